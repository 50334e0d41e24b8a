"""Malformed images and image parts, which a server of an image-text model must answer or reject.

    torchweave serve MODEL --served_model_name llava --limit_mm_per_prompt.image 3 --allowed_media_hosts localhost
    python -m tests.serving.http.malformed_images --count 1000 --url http://127.0.0.1:8000

The server takes at least three images a prompt, and looks up addresses of `localhost` only. `malformed.py` sends the cases.
"""

from __future__ import annotations

import base64
import io
import json
import random
import struct
import sys
import zlib
from collections.abc import Callable
from typing import Any

from PIL import Image

from tests.serving.http.malformed import Case, Kinds, Workload, main, post

CHAT = "/v1/chat/completions"
FORMATS = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "JPEG": ("L", "RGB", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("1", "L", "P"),
    "BMP": ("1", "L", "P", "RGB"),
    "TIFF": ("RGB", "CMYK", "F"),
}
SIZES = ((1, 1), (1, 200), (300, 1), (40, 50), (64, 64), (7, 900), (500, 400))


# -- files -------------------------------------------------------------------------------------------------------------


def picture(draw: random.Random) -> bytes:
    """A whole file of any format and mode; of several frames, with metadata or a rotation where the format has them."""
    kind = draw.choice(list(FORMATS))
    mode = draw.choice(FORMATS[kind])
    width, height = draw.choice(SIZES)
    image = Image.frombytes("RGB", (width, height), draw.randbytes(width * height * 3))
    image = image.convert("L").convert("I;16") if mode == "I;16" else image.convert(mode)
    file, options = io.BytesIO(), {}
    if kind in ("PNG", "GIF", "WEBP") and draw.random() < 0.2 and mode != "I;16":
        options = {"save_all": True, "append_images": [image] * draw.choice((1, 4))}
    if kind in ("PNG", "JPEG", "WEBP") and draw.random() < 0.3:
        exif = Image.Exif()
        exif[0x0112] = draw.choice((0, 3, 6, 8, 9, 255))
        options["exif"] = exif.tobytes() if draw.random() < 0.7 else b"Exif\0\0" + draw.randbytes(40)
    if draw.random() < 0.1:
        options["icc_profile"] = draw.randbytes(200)
    image.save(file, kind, **options)
    return file.getvalue()


def damaged(draw: random.Random) -> bytes:
    content = bytearray(picture(draw))
    for _ in range(draw.randint(1, 6)):
        at = draw.randrange(draw.choice((len(content), min(len(content), 64))))
        what = draw.randrange(5)
        if what == 0:
            content[at] = draw.randrange(256)
        elif what == 1:
            del content[at : at + draw.randint(1, 90)]
        elif what == 2:
            content[at:at] = draw.randbytes(draw.randint(1, 90))
        elif what == 3:
            content[at : at + 4] = draw.choice(
                (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4), b"\x00\x00\x00\x01")
            )
        else:
            del content[at + 1 :]
        content = content or bytearray(b"\x89")
    return bytes(content)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes, *chunks: bytes) -> bytes:
    """A PNG whose head claims a size."""
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def scans(draw: random.Random) -> bytes:
    """A large progressive JPEG of many scans."""
    file, side = io.BytesIO(), draw.choice((40, 3000))
    Image.new("L", (side, side), 128).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    return (
        content[:-2] + (b"\xff\xda" + content.rpartition(b"\xff\xda")[2][:-2]) * draw.choice((9, 2000)) + content[-2:]
    )


def run_lengths(draw: random.Random) -> bytes:
    """A BMP of a few bytes, whose lines a decoder has to fill."""
    width, height = draw.choice(((5000, 5000), (33_000_000, 1)))
    sizes = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, 2 * height + 2, 0, 0, 256, 0)
    return (
        b"BM" + struct.pack("<IHHI", 1080 + 2 * height, 0, 0, 1078) + sizes + bytes(1024) + b"\1\1" + bytes(2 * height)
    )


def bomb(draw: random.Random) -> bytes:
    """A small file that takes much memory or time to decode, or claims to."""
    zeros = zlib.compress(bytes(30_000_000), 9)
    size = draw.choice(
        ((5000, 5000), (5793, 5793), (60_000, 60_000), (1, 2**31 - 1), (2**31 - 1, 2**31 - 1), (33_000_000, 1))
    )
    files: tuple[Callable[[], bytes], ...] = (
        lambda: png(*size, zlib.compress(bytes(100))),
        lambda: png(*size, zeros),
        lambda: png(40, 40, zeros),
        lambda: png(40, 40, zlib.compress(bytes(40 * 121)), _chunk(b"zTXt", b"a\0\0" + zeros)),
        lambda: png(40, 40, zlib.compress(bytes(40 * 121)), _chunk(b"iCCP", b"a\0\0" + zeros)),
        lambda: png(40, 40, zlib.compress(bytes(40 * 121)), *[_chunk(b"tEXt", b"a\0b")] * 40_000),
        lambda: (
            b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"\x2c" + bytes(9) + b"\x02\x02\x44\x01\x00\x3b"
        ),
        lambda: (
            b"\xff\xd8\xff\xc0\x00\x11\x08\xff\xff\xff\xff\x03\x01\x22\x00\x02\x11\x01\x03\x11\x01\xff\xda" + bytes(90)
        ),
        lambda: b"BM" + struct.pack("<IIIIiiHHIIiiII", 99, 0, 54, 40, 2**31 - 1, -(2**31), 1, 24, 0, 0, 0, 0, 0, 0),
        lambda: (
            b"RIFF"
            + struct.pack("<I", 30)
            + b"WEBPVP8X"
            + struct.pack("<I", 10)
            + b"\x10\0\0\0"
            + b"\xff" * 6
            + bytes(4)
        ),
        lambda: b"RIFF" + draw.randbytes(4) + b"WEBPVP8L" + draw.randbytes(200),
        lambda: scans(draw),
        lambda: run_lengths(draw),
        lambda: png(1, 1 << 24, zlib.compress(bytes(4 << 24), 9)),
    )
    return draw.choice(files)()


# -- parts -------------------------------------------------------------------------------------------------------------


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def part(url: Any) -> Any:
    return {"type": "image_url", "image_url": {"url": url}}


def body(content: Any, draw: random.Random) -> dict[str, Any]:
    common = {"model": "llava", "max_tokens": draw.choice((1, 3)), "temperature": 0, "stream": draw.random() < 0.3}
    return common | {"messages": [{"role": "user", "content": content}]}


def chat(kind: str, content: Any, draw: random.Random, **how: Any) -> Case:
    return Case(kind, post(CHAT, json.dumps(body(content, draw)).encode()), **how)


def whole_file(draw: random.Random) -> Case:
    parts = [part(data_url(picture(draw))) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
    return chat("whole file", [*parts, {"type": "text", "text": "what"}], draw)


def damaged_file(draw: random.Random) -> Case:
    return chat("damaged file", [part(data_url(damaged(draw)))], draw)


def bomb_file(draw: random.Random) -> Case:
    return chat("bomb", [part(data_url(bomb(draw)))] * draw.choice((1, 1, 3)), draw)


def odd_url(draw: random.Random) -> Case:
    whole = data_url(picture(draw))
    head, _, content = whole.partition(",")
    at = draw.randrange(len(content))
    urls = (
        content, head, head + ",", whole + "=", whole + "\n", whole[:-1], head + "," + content[:at] + " " + content[at:],
        head + "," + content[:at] + "\u00e9" + content[at:], head + "," + content[:at] + "\0" + content[at:],
        "DATA:IMAGE/PNG;BASE64," + content, "data:image/png," + content, "data:text/html;base64," + content,
        "data:;base64," + content, "data:image/png;base64;base64," + content, "data:image/svg+xml;base64,PHN2Zy8+",
        head + "," + content.replace("+", "-").replace("/", "_"), "data:image/" + "x" * 100_000 + ";base64," + content,
        head + "," + "A" * 4_000_000, "file:///etc/passwd", "ftp://localhost/a.png", "//localhost/a.png", "", " ", "\ud800",
        "http://localhost:1/a.png", "https://localhost/a.png", "http://127.0.0.1/", "http://[::1]/", "http://2130706433/",
        "http://0177.0.0.1/", "http://user@localhost/", "http://localhost:99999/", "http://localhost\r\nX: y/",
        "http://" + "a" * 5000, "http://\u2488\u2488/", "HTTP://LOCALHOST/\0", "http:///", "http:/localhost", "https://[::ffff:127.0.0.1]/",
        "http://localhost.", "http://.", "http://-/",
    )  # fmt: skip
    return chat("odd URL", [part(draw.choice(urls))], draw)


def odd_part(draw: random.Random) -> Case:
    """Parts that are no images beside some that are, in messages and with fields of any kind."""
    image, url = part(data_url(picture(draw))), data_url(picture(draw))
    wrong = (
        None, 1, "a", [], {}, {"type": "image_url"}, {"type": "image_url", "image_url": None},
        {"type": "image_url", "image_url": {"url": None}}, {"type": "image_url", "image_url": {"url": [url]}},
        {"type": "image_url", "image_url": {"url": {"url": url}}}, {"type": "image_url", "image_url": [{"url": url}]},
        {"type": "image", "image": url}, {"type": "image", "image": None}, {"type": "image"},
        {"type": "input_image", "image_url": url}, {"type": "video_url", "video_url": {"url": url}},
        {"type": "input_audio", "input_audio": {"data": "AA"}}, {"type": ["image_url"], "image_url": {"url": url}},
        {"type": None}, {"image_url": {"url": url}}, {"type": "text", "text": None}, {"type": "text", "text": "\ud800"},
    )  # fmt: skip
    odd = (
        {"type": "image_url", "image_url": url},
        {"type": "image_url", "image_url": {"url": url, "detail": draw.choice(("low", "high", 5, None, {}))}},
        {"type": "text", "text": "<image>"}, {"type": "text", "text": "<image>" * 2000}, {"type": "text", "text": "a" * 3000},
        {"type": "text", "text": "\0<|end|>"}, {"type": "text", "text": ""}, image, image,
    )  # fmt: skip
    content = [draw.choice(odd) for _ in range(draw.choice((1, 2, 2, 3, 6)))]
    if draw.random() < 0.4:
        content.insert(draw.randrange(len(content) + 1), draw.choice(wrong))
    made = body(content, draw)
    made["messages"][0]["role"] = draw.choice(("user", "user", "user", "system", "assistant", "tool", "developer", "x"))
    made["messages"] *= draw.choice((1, 1, 1, 2, 9))
    fields: tuple[dict[str, Any], ...] = (
        {"truncate_prompt_tokens": 5}, {"n": 3}, {"add_special_tokens": True}, {"prompt_logprobs": 1}, {"echo": True},
        {"continue_final_message": True, "add_generation_prompt": False}, {"logprobs": True}, {"beam_width": 2},
        {"cache_salt": "a"}, {"chat_template_kwargs": {"image": 1}}, {"multi_modal_data": {"image": 1}},
        {"response_format": {"type": "json_object"}}, {"logit_bias": {"104": 100}, "max_tokens": 9, "ignore_eos": True},
    )  # fmt: skip
    made |= draw.choice(fields) if draw.random() < 0.5 else {}
    if draw.random() < 0.2:
        made = {"model": "llava", "messages": made["messages"]}
        return Case("odd part", post("/tokenize", json.dumps(made).encode()))
    return Case("odd part", post(CHAT, json.dumps(made).encode()))


def other_api(draw: random.Random) -> Case:
    """Images as the Responses and the Messages API have them."""
    content = draw.choice((picture, damaged, bomb))(draw)
    url, data = data_url(content), base64.b64encode(content).decode()
    if draw.random() < 0.5:
        images = (
            {"type": "input_image", "image_url": url}, {"type": "input_image", "image_url": url, "detail": "auto"},
            {"type": "input_image"}, {"type": "input_image", "image_url": None}, {"type": "input_image", "file_id": "f"},
            {"type": "input_image", "image_url": {"url": url}}, {"type": "input_image", "image_url": 5},
        )  # fmt: skip
        made: Any = {
            "model": "llava",
            "input": [{"role": "user", "content": [draw.choice(images)]}],
            "max_output_tokens": 2,
        }
        return Case("other API", post("/v1/responses", json.dumps(made).encode()))
    sources = (
        {"type": "base64", "media_type": "image/png", "data": data}, {"type": "base64", "media_type": 5, "data": data},
        {"type": "base64", "media_type": "text/html", "data": data}, {"type": "base64", "data": None},
        {"type": "base64", "data": 5}, {"type": "url", "url": url}, {"type": "url", "url": None}, {"type": "url"},
        {"type": "file", "file_id": "f"}, {}, None, 5, [data],
    )  # fmt: skip
    block = {"type": "image", "source": draw.choice(sources)}
    made = {"model": "llava", "messages": [{"role": "user", "content": [block]}], "max_tokens": 2}
    path = draw.choice(("/v1/messages", "/v1/messages", "/v1/messages/count_tokens"))
    return Case("other API", post(path, json.dumps(made).encode()))


def spoilt_text(draw: random.Random) -> Case:
    text = bytearray(json.dumps(body([part(data_url(picture(draw)))], draw)).encode())
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(text))
        text[at : at + draw.choice((0, 1, 5))] = draw.randbytes(draw.choice((0, 1, 5)))
    return Case("spoilt text", post(CHAT, bytes(text)))


def leaves(draw: random.Random) -> Case:
    """The client leaves once all is sent, or in the middle."""
    case = chat(
        "leaves", [part(data_url(picture(draw)))], draw, leave_after=draw.choice((-1, -1, 0, 300)), must_answer=False
    )
    if draw.random() < 0.4:
        case.data, case.leave_after = case.data[: draw.randrange(1, len(case.data))], -1
    case.pause = draw.choice((0, 0, 0.02))
    return case


PICTURE = picture(random.Random(5))
KINDS: Kinds = (
    (whole_file, 15), (damaged_file, 35), (bomb_file, 6), (odd_url, 14), (odd_part, 16), (other_api, 8), (spoilt_text, 3),
    (leaves, 6),
)  # fmt: skip
KNOWN = body([part(data_url(picture(random.Random(5)))), {"type": "text", "text": "what"}], random.Random(0))
IMAGES = Workload(KINDS, CHAT, KNOWN | {"stream": False, "max_tokens": 8})

if __name__ == "__main__":
    sys.exit(main(IMAGES))
