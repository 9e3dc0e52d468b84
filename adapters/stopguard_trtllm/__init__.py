"""The adapter for TensorRT-LLM's own server (`trtllm-serve`), and the patch for it. See the README beside this file.

This module imports nothing: the patch is loaded from here by an environment that is not StopGuard's.
"""
