"""A tiny model with random weights, made on the spot: what real engines are tested with on a machine without a GPU.

Run as a script by the interpreter of an engine's own environment, which has torch, transformers and tokenizers:

    PYTHON tiny_model.py FOLDER [--positions 8192] [--seed 0]

It is a Llama of two layers (hidden 128, four heads, vocabulary 2,048, float32, under a million weights) and a
byte-level BPE trained on the sources of Python's own standard library, with a chat template. The weights are drawn
ten times wider than is usual, which makes greedy text chaotic: one wrong, lost or doubled token changes all that
follows, so that two runs that agree have agreed everywhere. Equal seeds give equal weights on one version of torch.
"""

import argparse
import sysconfig
from pathlib import Path

VOCABULARY = 2048
HIDDEN = 128
LAYERS = 2
HEADS = 4
SPREAD = 0.2
SOURCES = 200
SPECIAL = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tokenizer(folder: Path, positions: int) -> None:
    """Train the tokenizer and save it in `folder`; takes about two seconds."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:SOURCES]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    tokenizer.train([str(path) for path in sources], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        model_max_length=positions,
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def save_weights(folder: Path, positions: int, seed: int) -> None:
    """Draw the weights and save them in `folder`."""
    import torch  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=positions,
        initializer_range=SPREAD,
        bos_token_id=SPECIAL.index("<s>"),
        eos_token_id=SPECIAL.index("</s>"),
        pad_token_id=SPECIAL.index("</s>"),
        tie_word_embeddings=False,
        torch_dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    """Make the model in the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--positions", type=int, default=8192, help="longest sequence, in tokens")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(arguments.folder, arguments.positions)
    save_weights(arguments.folder, arguments.positions, arguments.seed)


if __name__ == "__main__":
    main()
