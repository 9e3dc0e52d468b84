"""A small model with random weights in llama.cpp's file format: what its real server is tested with.

Run as a script by the interpreter of the engine's own environment, which has gguf and numpy:

    PYTHON tiny_gguf.py FILE [--layers 2] [--width 128] [--seed 0] [--positions 32768] [--spelled] [--exact]

It is a Llama with a byte-level BPE of its own (all bytes, then pairs of letters) and a ChatML template. Only printable
ASCII and the pairs can be sampled: the rows of everything else in the output matrix are zero, so that greedy text never
ends by itself and is valid UTF-8 at each token. The weights are drawn wide, which makes greedy text chaotic: one wrong,
lost or doubled token changes all that follows. Equal seeds give equal files.

With `--spelled` it also writes characters that it has no token for, byte by byte: their first bytes can be sampled, and
one dimension of the embedding for each byte but the last makes the next one follow for certain.
"""

import argparse
import string
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import numpy as np  # type: ignore[import-not-found]

PAIRS = 1000
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPELLED = ("é", "→", "🙂")
_VISIBLE = (range(33, 127), range(161, 173), range(174, 256))


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level BPE, as GPT-2 laid down."""
    visible = {value for span in _VISIBLE for value in span}
    hidden = iter(range(256, 512))
    return [chr(value) if value in visible else chr(next(hidden)) for value in range(256)]


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens (bytes, then pairs) and the merges that make the pairs."""
    tokens = byte_letters()
    space = tokens[32]
    letters = string.ascii_lowercase
    pairs = [(space, letter) for letter in letters]
    pairs += [(space + first, second) for first in letters for second in letters]
    pairs += [(first, second) for first in letters for second in letters]
    chosen = pairs[:PAIRS]
    return tokens + [first + second for first, second in chosen], [f"{first} {second}" for first, second in chosen]


def write(
    path: Path, *, layers: int, width: int, positions: int, seed: int, spelled: bool = False, exact: bool = False
) -> None:
    """Write the model; heads are 32 wide, two share one key, the inner layer is twice as wide."""
    random = np.random.default_rng(seed)
    tokens, merges = vocabulary()
    ordinary = len(tokens)
    tokens += CONTROL
    heads = width // 32
    shared = max(1, heads // 2)

    def matrix(rows: int, columns: int, spread: float) -> Any:
        return (random.standard_normal((rows, columns), dtype=np.float32) * spread).astype(
            np.float32 if exact else np.float16
        )

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(f"random-{layers}x{width}")
    writer.add_context_length(positions)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(2 * width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(shared)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(32)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if exact else gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * ordinary + [gguf.TokenType.CONTROL] * len(CONTROL))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(ordinary)
    writer.add_eos_token_id(ordinary + CONTROL.index("<|im_end|>"))
    writer.add_pad_token_id(ordinary)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    wide = 1.0 / np.sqrt(width)
    output = matrix(len(tokens), width, 2.0 * wide)
    first_bytes = {character.encode()[0]: output[character.encode()[0]].copy() for character in SPELLED}
    output[:33] = output[127:256] = output[ordinary:] = 0
    embedding = matrix(len(tokens), width, 1.0)
    if spelled:
        steps = [
            pair for character in SPELLED for pair in zip(character.encode(), character.encode()[1:], strict=False)
        ]
        embedding[:, : len(steps)] = output[:, : len(steps)] = 0
        for byte, row in first_bytes.items():
            output[byte] = row * 1.9
            output[byte, : len(steps)] = 0
        for dimension, (byte, following) in enumerate(steps):
            embedding[byte, dimension] = 30
            output[following, dimension] = 1.6
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output.weight", output)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for layer in range(layers):
        shapes = {
            "attn_q": (width, width),
            "attn_k": (shared * 32, width),
            "attn_v": (shared * 32, width),
            "attn_output": (width, width),
            "ffn_gate": (2 * width, width),
            "ffn_up": (2 * width, width),
            "ffn_down": (width, 2 * width),
        }
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, np.float32))
        for name, (rows, columns) in shapes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", matrix(rows, columns, 1.0 / np.sqrt(columns)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write the file that the command line names, complete or not at all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--positions", type=int, default=32768, help="longest sequence, in tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spelled", action="store_true", help="characters of several tokens come too")
    parser.add_argument("--exact", action="store_true", help="weights of 32 bits")
    given = parser.parse_args()
    part = given.file.with_suffix(".part")
    write(
        part,
        layers=given.layers,
        width=given.width,
        positions=given.positions,
        seed=given.seed,
        spelled=given.spelled,
        exact=given.exact,
    )
    part.replace(given.file)


if __name__ == "__main__":
    main()
