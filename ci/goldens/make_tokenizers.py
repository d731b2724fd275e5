#!/usr/bin/env python3
"""Writes tokenizers.json, with which crates/text/src/tokenizer/tests/goldens.rs compares the tokenizer with Hugging Face's `tokenizers` and
with SentencePiece, for tokenizers in the layouts of the served families. Only needed if the layouts or the texts change.

    pip install tokenizers sentencepiece
    python make_tokenizers.py

Format: {"fragments", "texts", "json": {name: tokenizer}, "gguf": {name: tokenizer}}. A text is made of a few fragments, which the function
`texts` chooses as the test does. Each tokenizer has its file (`file` is the tokenizer.json, `data` the fields of a GGUF file), and the first two
digits of the SHA-256 of each text's ids (`ids`) and of the text that these are decoded to (`texts`).
"""
import hashlib
import io
import json
import pathlib
import struct
import tempfile

import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as pb
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import texts as documents

HERE = pathlib.Path(__file__).parent
TEXTS = 3000
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
FRAGMENTS = [
    "the", "The", "whale", "Ishmael", "Call me", "sea", "and", "of the", "ship's", "don't", "WE'LL", "I'm", "unbelievably", "aaaaaaaa", "x", "Zz", "café", "naïve", "straße", "Ünïcödé",
    " ", " ", " ", "  ", "   ", "     ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ", "\u00a0", "\u3000", "\u2028", "\u200b", "\u200d", "\ufeff", "\u0085", "\u2581", " \u2581",
    "0", "7", "42", "123", "1234", "2024-07-04", "3.14159", "½", "Ⅷ", "٣٤", "१२", "²",
    ".", ",", "!", "?", "...", "--", "—", "…", "'", "\"", "“”", "(", ")", "[", "]", "{", "}", "<", ">", "/", "\\", "|", "_", "__", "*", "**", "#", "```", "$", "€", "%", "&", "@", "~", "^", "=", "==", "=>", "->", "::",
    "Привет", "мир", "你好", "世界", "。", "，", "第四十二章", "こんにちは", "カタカナ", "안녕", "하세요", "שלום", "مرحبا", "नमस्ते", "สวัสดี", "გამარჯობა", "Ελλάδα", "Việt", "e\u0301", "A\u030a", "\u1100\u1161",
    "ＡＢ", "ﬁn", "🙂", "🦀", "👩‍👩‍👧", "🇵🇪", "👍🏽", "𝔘𝔫𝔦", "\U0010fffd", "\ue000", "\x00", "\x07", "\x1b[0m", "\x7f", "\x1c",
    "fn main() {", "    return x;", "if (a && b)", "http://example.com/?q=1&r=2", "user@example.com", "C:\\dir\\file", "\\n", "&amp;", "<b>", "</b>", "<0x41>", "<0xE2>",
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<unk>", "<s", "s>", "<|im_", "[INST]", "<tool>", "</tool>",
]
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+END|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*END|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# The regular expressions of the families' tokenizer.json, by the pre-tokenizer's name in GGUF files.
BYTE_LEVEL = {
    "llama-bpe": [WORDS.replace("DIGITS", "{1,3}")],
    "qwen2": [WORDS.replace("DIGITS", "")],
    "qwen35": [r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "tekken": [CASED.replace("END", "").replace("DIGITS", "")],
    "gpt-4o": [CASED.replace("END", ENDINGS).replace("DIGITS", "{1,3}")],
    "deepseek-v3": [
        r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^""" + "\r\n" + r"""\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[""" + "\r\n" + r"""]*|\s*[""" + "\r\n" + r"""]+|\s+(?!\S)|\s+""",
    ],
    "smollm": None,
}
COMPOSED = ("qwen2",)
WHOLE_WORDS = ("llama-bpe", "tekken")


def texts():
    """Returns the texts. The numbers are those of a linear congruential generator with 64 bits."""
    state = 1

    def number(limit):
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) % limit

    return ["".join(FRAGMENTS[number(len(FRAGMENTS))] for _ in range(number(12))) for _ in range(TEXTS)]


def digits(data):
    return hashlib.sha256(data).hexdigest()[:2]


def sums(encode, decode):
    every = [encode(text) for text in texts()]
    return {
        "ids": "".join(digits(struct.pack(f"<{len(ids)}I", *ids)) for ids in every),
        "texts": "".join(digits(decode(ids).encode()) for ids in every),
    }


def train_sentence_piece(kind, size, **options):
    model = io.BytesIO()
    # Fallback to bytes needs 256 tokens.
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(documents.DOCUMENTS).split("\n")), model_writer=model, model_type=kind, vocab_size=size, num_threads=1,
        split_digits=True, allow_whitespace_only_pieces=True, max_sentencepiece_length=12, hard_vocab_limit=False, minloglevel=2, **options,
    )
    proto = pb.ModelProto()
    proto.ParseFromString(model.getvalue())
    return proto, sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def merges_of(proto):
    """Returns the merges that have the effect of the scores, as Hugging Face's converter does."""
    score = {piece.piece: piece.score for piece in proto.pieces}
    index = {piece.piece: index for index, piece in enumerate(proto.pieces)}
    merges = []
    for text in score:
        own = [(text[:cut], text[cut:]) for cut in range(1, len(text)) if text[:cut] in score and text[cut:] in score]
        merges += [(left, right, score[text]) for left, right in sorted(own, key=lambda pair: (index[pair[0]], index[pair[1]]))]
    merges.sort(key=lambda merge: merge[2], reverse=True)
    return index, [(left, right) for left, right, _ in merges]


def added(tokenizer, special=SPECIAL, plain=("<tool>",), **options):
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False, **options) for token in plain])
    return tokenizer


def pieces(proto, normalizer=None, pre_tokenizer=None, strip=True):
    vocabulary, merges = merges_of(proto)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return added(tokenizer)


def unigram(proto):
    vocabulary = [(piece.piece, piece.score) for piece in proto.pieces]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=proto.trainer_spec.unk_id, byte_fallback=False))
    steps = [normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return added(tokenizer)


def byte_level(name, regexes):
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(documents.DOCUMENTS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokenizer = Tokenizer(models.BPE(model["vocab"], [tuple(merge) for merge in model["merges"]], ignore_merges=name in WHOLE_WORDS))
    if regexes is None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    else:
        splits = [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in regexes]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if name in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    # A token like those of Phi-3: it takes the spaces after it.
    return added(tokenizer, rstrip=name == "smollm", lstrip=name == "tekken")


def json_golden(tokenizer, **fields):
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
    return {"file": json.loads(tokenizer.to_str()), **fields, **sums(encode, decode)}


def gguf_golden(proto, processor):
    kinds = {kind: number for kind, number in pb.ModelProto.SentencePiece.Type.items()}
    own = {kinds["NORMAL"]: 1, kinds["UNKNOWN"]: 2, kinds["CONTROL"]: 3, kinds["USER_DEFINED"]: 4, kinds["UNUSED"]: 5, kinds["BYTE"]: 6}
    data = {
        "tokens": [piece.piece for piece in proto.pieces],
        "scores": [piece.score for piece in proto.pieces],
        "token_types": [own[piece.type] for piece in proto.pieces],
        "add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
    }
    return {"data": data, **sums(processor.encode, processor.decode)}


def main():
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "character_coverage": 0.999}
    bpe, bpe_processor = train_sentence_piece("bpe", 700, byte_fallback=True, **plain)
    bare, bare_processor = train_sentence_piece("bpe", 600, byte_fallback=True, add_dummy_prefix=False, **plain)
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        # Wide letters and ligatures become plain ones; a zero-width space disappears.
        rules.write("FF21\t41\nFF22\t42\nFB01\t66 69\n200B\t\n3000\t20\nBD\t31 2044 32\n")
        rules.flush()
        plain_unigram, _ = train_sentence_piece("unigram", 400, normalization_rule_tsv=rules.name)
    replace = normalizers.Replace(" ", "▁")
    written = {
        "llama-2": pieces(bpe, normalizers.Sequence([normalizers.Prepend("▁"), replace])),
        "mistral": pieces(bpe, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
        "gemma": pieces(bare, replace, pre_tokenizers.Split(" ", "merged_with_previous"), strip=False),
        "unigram": unigram(plain_unigram),
    }
    goldens = {
        "fragments": FRAGMENTS,
        "texts": TEXTS,
        "json": {name: json_golden(tokenizer) for name, tokenizer in written.items()}
        | {name: json_golden(byte_level(name, regexes), pre=name) for name, regexes in BYTE_LEVEL.items()},
        "gguf": {"llama": gguf_golden(bpe, bpe_processor), "gemma": gguf_golden(bare, bare_processor)},
    }
    path = HERE / "tokenizers.json"
    path.write_text(json.dumps(goldens, ensure_ascii=True, separators=(",", ":")) + "\n")
    print({name: len(golden["file"]["model"]["vocab"]) for name, golden in goldens["json"].items()}, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
