"""Small tokenizer.json files: one of whole words, and one of bytes whose characters beyond ASCII take several ids."""

from __future__ import annotations

from pathlib import Path

WORDS = ("[UNK]", "<pad>", "</s>", "the", "cat", "sat", "down")


def word_level(folder: Path, special: tuple[str, ...] = ("<pad>", "</s>"), *, cut: bool = False) -> Path:
    """A word-level tokenizer.json whose ids are places in WORDS; `cut` stores a truncation and a template in it."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

    library = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    library.normalizer = normalizers.Strip()
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens([AddedToken(name, special=True) for name in special])
    if cut:
        library.enable_truncation(2)
        library.enable_padding(pad_id=1, pad_token="<pad>", length=6)
        library.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    path = folder / "tokenizer.json"
    library.save(str(path))
    return path


def byte_level(folder: Path, special: list[str]) -> Path:
    """A byte-level tokenizer.json with a few merges and a truncation stored in it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=270, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(["def return def return"] * 3, trainer)
    library.enable_truncation(3)
    library.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
