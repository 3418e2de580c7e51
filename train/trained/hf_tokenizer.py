"""A tokenizer in the files of transformers, with the same ids and begin token as in training.

One difference remains: where a text spells a special token, transformers reads it as that token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from train.data.tokenizer import (
    BYTES_END_OF_TEXT,
    ByteTokenizer,
    JsonTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)

_SPACE = "\u2581"  # SentencePiece's sign for a space


def save_for_transformers(
    tokenizer: Tokenizer,
    folder: Path,
    longest: int,
    bos_id: int | None,
    add_bos: bool,
    settings: Mapping[str, Any],
) -> None:
    """Write `tokenizer` into a folder, for transformers' AutoTokenizer and train.data.tokenizer.

    `longest` is the most tokens of a text, `bos_id` transformers' begin token, or None, which
    `add_bos` puts in front of every text. `settings` replace fields of tokenizer_config.json.
    Raises ValueError for SentencePiece models that transformers cannot represent.
    """
    backend = _convert(tokenizer)
    begin = None if bos_id is None else backend.id_to_token(bos_id)
    if add_bos:
        assert begin is not None
        _put_in_front(begin, backend)
    backend.save(str(folder / "tokenizer.json"))
    written = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": backend.id_to_token(tokenizer.eos_id),
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(written, indent=2) + "\n")
    if isinstance(tokenizer, JsonTokenizer):
        tokenizer = JsonTokenizer(folder / "tokenizer.json", tokenizer.eos)
    tokenizer.save(folder)


def _put_in_front(begin: str, backend: Backend) -> None:
    template = {"single": [begin, "$A"], "pair": [begin, "$A", begin, "$B:1"]}
    special = [(begin, backend.token_to_id(begin))]
    rules = processors.TemplateProcessing(**template, special_tokens=special)
    before = backend.post_processor
    backend.post_processor = processors.Sequence([before, rules]) if before else rules


def _convert(tokenizer: Tokenizer) -> Backend:
    if isinstance(tokenizer, ByteTokenizer):
        return _convert_bytes(tokenizer)
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _convert_sentencepiece(tokenizer.file)
    assert isinstance(tokenizer, JsonTokenizer)
    settings = json.loads(tokenizer.file.read_text())
    settings |= {"truncation": None, "padding": None}
    if Backend.from_file(str(tokenizer.file)).num_special_tokens_to_add(False):
        settings["post_processor"] = None  # it adds tokens around a text
    return Backend.from_str(json.dumps(settings))


def _convert_bytes(tokenizer: ByteTokenizer) -> Backend:
    """Return a tokenizer without characters, so that each character becomes its bytes."""
    backend = Backend(
        models.BPE(vocab={f"<0x{i:02X}>": i for i in range(256)}, merges=[], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(BYTES_END_OF_TEXT, special=True, normalized=False)])
    assert backend.token_to_id(BYTES_END_OF_TEXT) == tokenizer.eos_id
    return backend


def _convert_sentencepiece(file: Path) -> Backend:
    """Return a SentencePiece model, with its normalization and decoding, as tokenizers has them."""
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2  # it makes its classes when it is imported
    proto = messages.ModelProto()
    proto.ParseFromString(file.read_bytes())
    trainer, spec = proto.trainer_spec, proto.normalizer_spec
    if trainer.treat_whitespace_as_suffix or not spec.escape_whitespaces:
        raise ValueError(f"{file} writes spaces in a way that transformers does not support")
    if trainer.model_type == trainer.UNIGRAM:
        backend = Backend(_make_unigram(proto))
    elif trainer.model_type == trainer.BPE:
        backend = Backend(_make_bpe(proto))
    else:
        raise ValueError(
            f"{file} is neither a BPE nor a unigram model, which transformers supports"
        )
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    after = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*after, *([decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else [])]
    )
    for piece in proto.pieces:
        if piece.type in (piece.UNKNOWN, piece.CONTROL):
            backend.add_special_tokens([AddedToken(piece.piece, special=True, normalized=False)])
        elif piece.type == piece.USER_DEFINED:
            backend.add_tokens([AddedToken(piece.piece, special=False, normalized=False)])
    return backend


def _make_unigram(proto: Any) -> models.Unigram:
    """Make pieces that no text should become unlikely: tokenizers has no other way."""
    normal = [piece.score for piece in proto.pieces if piece.type == piece.NORMAL]
    unlikely = 20 * min(normal, default=-1.0)
    scores = [(p.piece, p.score if p.type == p.NORMAL else unlikely) for p in proto.pieces]
    spec = proto.trainer_spec
    return models.Unigram(scores, unk_id=spec.unk_id, byte_fallback=spec.byte_fallback)


def _make_bpe(proto: Any) -> models.BPE:
    """Merge two pieces into one in the order of its score, the highest first."""
    vocab = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    merges = [
        (
            -piece.score,
            vocab[piece.piece[:cut]],
            vocab[piece.piece[cut:]],
            (piece.piece[:cut], piece.piece[cut:]),
        )
        for piece in proto.pieces
        if piece.type == piece.NORMAL
        for cut in range(1, len(piece.piece))
        if piece.piece[:cut] in vocab and piece.piece[cut:] in vocab
    ]
    spec = proto.trainer_spec
    return models.BPE(
        vocab,
        [pair for *_, pair in sorted(merges)],
        unk_token=proto.pieces[spec.unk_id].piece,
        fuse_unk=True,
        byte_fallback=spec.byte_fallback,
    )
