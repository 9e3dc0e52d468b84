"""What an engine's scheduler says about its requests, and how it travels.

`wire` is the event schema. Everything that speaks for an engine from inside (a plugin, the
reference engine) emits these events; everything that keeps books reads them.
"""
