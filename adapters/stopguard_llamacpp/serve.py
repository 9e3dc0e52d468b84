"""llama.cpp's real HTTP server in one process, from the xllamacpp wheel; run by the engine's own interpreter.

    PYTHON serve.py MODEL --port PORT [--slots 4] [--context 32768] [--batch 2048] [--http-threads 64] [--verbosity 3]
        [--exact]

The names of `llama-server` for the same: `-m`, `--port`, `-np`, `-c`, `-b`/`-ub`, `--threads-http`, `-lv`, with
`--slots` and `--metrics` switched on.
"""

import argparse
import signal
import sys
import threading

import xllamacpp


def main() -> None:
    """Serve until a signal ends it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--alias", default="tiny")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--context", type=int, default=32768, help="tokens in all slots together")
    parser.add_argument("--batch", type=int, default=2048, help="prompt tokens of one step")
    parser.add_argument("--http-threads", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--verbosity", type=int, default=-1, help="of the log; -1: llama.cpp's own default")
    parser.add_argument("--exact", action="store_true", help="attention and its memory in 32 bits")
    given = parser.parse_args()
    parameters = xllamacpp.CommonParams()
    parameters.model.path = given.model
    parameters.model_alias = {given.alias}
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = given.port
    parameters.n_parallel = given.slots
    parameters.n_ctx = given.context
    parameters.n_batch = parameters.n_ubatch = given.batch
    parameters.n_threads_http = given.http_threads
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = given.threads
    parameters.endpoint_slots = parameters.endpoint_metrics = True
    parameters.warmup = False
    if given.exact:
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    if given.verbosity >= 0:
        parameters.verbosity = given.verbosity
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    server = xllamacpp.Server(parameters)
    sys.stderr.write(f"llama.cpp {xllamacpp.__version__} at {server.listening_address}\n")
    ended.wait()


if __name__ == "__main__":
    main()
