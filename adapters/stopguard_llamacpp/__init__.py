"""StopGuard at llama.cpp's server: the adapter, the audit's observer, and how to run the real one in tests."""
