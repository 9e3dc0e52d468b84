"""StopGuard at DeepInfer: beside it (`adapter`, over HTTP), inside it (`inprocess`), and with the HTTP face
that it lacks (`face`).

`cpu/` builds and drives its real C++ scheduler on a machine without an accelerator.
"""
