#!/usr/bin/env python3
"""Makes tests/data/tokenizers: two small SentencePiece vocabularies, and the ids of texts.

    python3 -m venv V && V/bin/pip install sentencepiece==0.2.3 protobuf==7.36.2
    V/bin/python scripts/tokenizer_goldens.py

sentencepiece trains a BPE vocabulary with byte fallback on the lines below, once as Llama 2's is
(a space in front of each text, runs of spaces that all have the same low score) and once as
Gemma's (no space in front, user-defined runs of spaces and newlines, tags). Both are stored as
llama.cpp's converter writes them into a GGUF file: tokens, scores, types.

The ids are sentencepiece's. It does not look for control tokens in a text: what lies between them
is encoded on its own here, as llama.cpp and Hugging Face's tokenizers do.
"""

import io
import json
import pathlib
import random
import re

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data" / "tokenizers"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

LINES = """
The quick brown fox jumps over the lazy dog, and the dog does not mind at all.
There are three things that nobody ever told the other children about the lighthouse.
She sells what she has, he keeps what he was given; neither of them remembers why.
Whether the weather is better than the weather that they had there before, who can say?
"Where is the cheese?" asked the mouse. "It's here," answered the other mouse, "isn't it?"
I'm sure we'll find out whether they've been there. You'd better ask them, they're nice.
In 1984 there were 3.14159 reasons; in 2024 there are 42, or 17 % more than in 1999.
Call 555-0199 or 555-0123 between 10:30 and 12:45, from Monday to Friday only.
def main(arguments): return [value for value in arguments if value is not None]
for (int i = 0; i < 10; ++i) { total += values[i] * weights[i]; } // the sum of products
let result = match value { Some(x) => x + 1, None => return Err(Error::Missing) };
if (a == b && c != d || !e) { print("a is b"); } else { print("a is not b"); }
https://example.com/path/to/the/file.html?query=value&other=value#fragment
<b>bold</b> and <i>italic</i> and <b><i>both</i></b> are <a href="here">tags</a>
Größere Schüler hören schöne Klänge über der Straße; außerdem müßten fünf Füchse süß träumen.
Der schnelle braune Fuchs springt über den faulen Hund, und der Hund schläft weiter.
L'été dernier, où était-il ? À l'école, peut-être, ou bien chez sa tante : c'était très gênant.
Le renard brun saute par-dessus le chien paresseux qui dort près de la fenêtre fermée.
El niño soñó que mañana, en el jardín, comería una piña pequeña; ¿por qué no? ¡Qué sueño!
O coração não sabe o que a razão já esqueceu: amanhã será outro dia, e então veremos.
Zażółć gęślą jaźń, powiedział wąż, a potem poszedł spać na łące pod lasem.
Съешь же ещё этих мягких французских булок, да выпей чаю, сказал старый учитель.
Быстрая лиса прыгает через ленивую собаку, которая спит у большого дома.
日本語の文章には漢字とひらがなとカタカナが混ざっている。日本の人は日本語を話す。
中文的句子里没有空格。中国人说中文，日本人说日语。天气很好，我们去公园吧。
빠른 갈색 여우가 게으른 개를 뛰어넘는다. 개는 그래도 잔다. 한국어 문장에는 빈칸이 있다.
السلام عليكم، كيف حالك اليوم؟ الكلب نائم والثعلب يقفز فوقه.
""".strip().splitlines()
WORDS = """
the there then other mother another whether weather together gather rather father and hand stand
standing under understand understanding thunder sing singing king walking talking being be been
token tokens tokenizer tokenization vocabulary attention attentive cache cached caching page paged
paging block blocks blocking memory memories remember number numbers value values valuable select
selected selection direct direction action reaction nation national international function
""".split()

TEXTS = [
    "",
    " ",
    "  ",
    "a",
    " a",
    "a ",
    "  leading",
    "trailing  ",
    "many       spaces   between  words",
    " " * 15 + "x",
    " " * 16 + "x",
    " " * 17 + "x" + " " * 40,
    "\n",
    "\n\n\n",
    "a\nb\n\nc\r\n\td",
    "def main():\n    for i in range(10):\n\tif i % 2:\n            print(i)\n\n\n    return 0\n",
    "The quick brown fox jumps over the lazy dog.",
    "whether the others understand the international tokenization of the nation",
    "unrelated, unmotherly, understandingly: rereactionary caching!",
    "In 1984, 3.14159 + 42 = 45.14159; phone 555-0199. 1234567890",
    "Größe, Straße, été, où, mañana, não, zażółć, wąż",
    "Съешь ещё мягких булок",
    "日本語を話す中国人 한국어 السلام عليكم",
    "emoji 😀👩\u200d👩\u200d👧\u200d👦🏳\ufe0f\u200d🌈 end",
    "a\u0301 e\u0308 combining, \u0301 alone, \u200d\ufeff\u00a0\u3000",
    "ქართული ไทย हिन्दी: not in the vocabulary",
    "\0\x01\x7f\u2029",
    "aaaaaaaaaaaaaaaaa --------- ======= wwwwwww ththththth",
    "<0x41> <0xE2> is text",
    "it's, isn't, we'll, they've; \"quotes\" “curly” … — €100",
    "<b>bold</b> <i>x</i>\n\n<b>",
    "<s>the other</s>",
    "the <s> other  </s> <s>",
    "<s><s></s>the",
    "<turn>user\nthe other<end>\n<turn>model\n",
]


def train(**options):
    rng = random.Random(0)
    lines = LINES * 3
    for _ in range(300):
        lines.append(" ".join(rng.choice(WORDS) for _ in range(rng.randint(3, 9))))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=1.0,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def with_space_runs(model):
    """Llama 2's vocabulary has runs of up to 16 spaces, all of the same score."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    for length in (16, 8, 4, 2, 3, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15):
        proto.pieces.add(piece="▁" * length, score=-1e9)
    return proto.SerializeToString()


def describe(processor):
    """Tokens, scores and types as in a GGUF file."""
    tokens, scores, types = [], [], []
    for i in range(processor.vocab_size()):
        token, score, kind = processor.id_to_piece(i), processor.get_score(i), NORMAL
        if processor.is_unknown(i):
            kind = UNKNOWN
        elif processor.is_control(i):
            kind = CONTROL
        elif processor.is_byte(i):
            kind = BYTE
        elif token in USER:
            # The converter writes these as they stand in a text.
            token, score, kind = token.replace("▁", " "), -1000.0, USER_DEFINED
        tokens.append(token)
        scores.append(score)
        types.append(kind)
    assert len(set(tokens)) == len(tokens)
    return tokens, scores, types


def encode(processor, text):
    """Ids with control tokens found in the text."""
    controls = [processor.id_to_piece(i) for i in range(processor.vocab_size()) if processor.is_control(i)]
    ids = []
    for part in re.split("(" + "|".join(map(re.escape, controls)) + ")", text):
        ids += [processor.piece_to_id(part)] if part in controls else processor.encode(part)
    return ids


def texts(processor):
    """Those above and random ones."""
    rng = random.Random(1)
    pieces = [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    pieces = [p.replace("▁", " ") for i, p in enumerate(pieces) if not processor.is_byte(i) and p != "<unk>"]
    letters = "abcdeghinorst" * 2 + "ABXYZ 01289 .,;:!?()[]{}<>/'\"-_=+*&|\n\t" + "éüßñłжыя日本中한국😀👩\u200d\u0301Ω"
    out = list(TEXTS)
    for _ in range(100):
        parts = rng.choices([rng.choice(pieces), rng.choice(letters) * rng.randint(1, 4), " ", rng.choice(WORDS)], k=2)
        for _ in range(rng.randint(1, 25)):
            parts.append(rng.choice([rng.choice(pieces), rng.choice(letters), rng.choice(WORDS), " " * rng.randint(1, 6)]))
        out.append("".join(parts))
    return out


def write(name, model, add_space_prefix):
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokens, scores, types = describe(processor)
    golden = dict(
        sentencepiece=sentencepiece.__version__,
        add_space_prefix=add_space_prefix,
        bos=processor.bos_id(),
        eos=processor.eos_id(),
        tokens=tokens,
        scores=scores,
        types=types,
        texts=[dict(text=text, ids=encode(processor, text)) for text in texts(processor)],
    )
    path = OUT / f"{name}.json"
    path.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")).replace('{"text"', '\n{"text"') + "\n")
    print(f"{path.name}: {len(tokens)} tokens, {len(golden['texts'])} texts, {path.stat().st_size} bytes")


USER = []
write("spaced", with_space_runs(train(vocab_size=1000, add_dummy_prefix=True)), True)
USER = ["\n" * n for n in range(1, 8)] + ["▁" * n for n in range(2, 8)] + ["\t", "\t\t"]
USER += ["<b>", "</b>", "<i>", "</i>"]
write(
    "unspaced",
    train(
        vocab_size=1000,
        add_dummy_prefix=False,
        user_defined_symbols=USER,
        control_symbols=["<turn>", "<end>"],
    ),
    False,
)
