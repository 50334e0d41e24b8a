"""`/v1/embeddings`, `/v1/score`, `/v1/rerank` and `/classify`, with OpenAI's client and by hand."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

import torchweave
from tests.serving.running import ServerProcess, serving
from torchweave.models.materialize import quiet_transformers
from torchweave.verify import zoo

DEMO = Path(torchweave.__file__).parent / "models" / "demo"
TEXTS = ["sort: pear fig", "sort: fig pear apple plum kiwi", "3+4="]


def saved(model: PreTrainedModel, folder: Path) -> Path:
    zoo.save(model, folder)
    for file in DEMO.glob("token*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    with quiet_transformers():
        return AutoModel.from_pretrained(DEMO, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def embedder(base: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = saved(base, tmp_path_factory.mktemp("embedder") / "embedder")
    with serving("--max_num_tokens", "16", "--max_request_sequences", "8", model=str(folder)) as process:
        yield process


@torch.no_grad()
def expected(base: PreTrainedModel) -> np.ndarray:
    """transformers' normalized hidden states of the last tokens of `TEXTS`."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    rows = [base(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1] for text in TEXTS]
    return torch.nn.functional.normalize(torch.stack(rows)).numpy()


def test_openai_client_gets_the_embeddings(embedder: ServerProcess, base: PreTrainedModel) -> None:
    """The client asks for base64 by itself; floats, token ids and one text give the same numbers."""
    want, create = expected(base), embedder.client().embeddings.create
    answer = create(model="embedder", input=TEXTS)
    np.testing.assert_allclose([each.embedding for each in answer.data], want, atol=1e-4)
    ids = [AutoTokenizer.from_pretrained(DEMO).encode(text) for text in TEXTS]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    assert [each.index for each in answer.data] == [0, 1, 2] and answer.model == "embedder"
    for given, rows in ((ids, want), (ids[1], want[1:2]), (TEXTS[2], want[2:])):
        numbers = create(model="embedder", input=given, encoding_format="float").data  # type: ignore[arg-type]
        np.testing.assert_allclose([each.embedding for each in numbers], rows, atol=1e-4)
    cut = create(model="embedder", input=TEXTS[0], dimensions=8).data[0].embedding
    np.testing.assert_allclose(cut, want[0, :8] / np.linalg.norm(want[0, :8]), atol=1e-4)


def test_scores_and_ranks_are_cosines(embedder: ServerProcess, base: PreTrainedModel) -> None:
    rows = expected(base)
    cosines = rows[1:] @ rows[0]
    for path in ("/v1/score", "/score"):
        answer = embedder.post(path, {"model": "embedder", "text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()
        assert [each["score"] for each in answer["data"]] == pytest.approx(cosines.tolist(), abs=1e-4)
    best = int(cosines.argmax())
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        body = {"query": TEXTS[0], "documents": [{"text": TEXTS[1]}, {"text": TEXTS[2]}], "top_n": 1}
        results = embedder.post(path, body).json()["results"]
        assert [(each["index"], each["document"]["text"]) for each in results] == [(best, TEXTS[1 + best])]
        assert "document" not in embedder.post(path, body | {"return_documents": False}).json()["results"][0]


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/v1/embeddings", {"input": []}, "input: expected a text"),
        ("/v1/embeddings", {"input": [[]]}, "input: expected a text"),
        ("/v1/embeddings", {"input": [10**9]}, "token id outside"),
        ("/v1/embeddings", {"input": [-1]}, "token id outside"),
        ("/v1/embeddings", {"input": "a", "dimensions": 10**6}, "dimensions must be from 1 to"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "dimension": 1}, "unknown field 'dimension'"),
        ("/v1/embeddings", {"input": [7] * 5000}, "max_model_len is"),
        ("/v1/embeddings", {"input": ["a"] * 9}, "at most 8"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1 has 2 and text_2 has 3"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents: expected a list"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 8}, "at most 8"),
        ("/classify", {"input": "a"}, "no classification head"),
        ("/v1/completions", {"prompt": "a"}, "computes embeddings, no text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "computes embeddings, no text"),
    ],
)
def test_bad_input_gets_400(embedder: ServerProcess, path: str, body: dict[str, object], sentence: str) -> None:
    answer = embedder.post(path, body)
    assert answer.status_code == 400, answer.text
    assert sentence in answer.json()["error"]["message"]


def test_document_lists_the_routes(embedder: ServerProcess) -> None:
    paths = embedder.get("/openapi.json").json()["paths"]
    assert {"/v1/embeddings", "/v1/score", "/v1/rerank", "/rerank", "/classify"} <= set(paths)
    assert "429" in paths["/v1/embeddings"]["post"]["responses"]


def test_classifier_reads_pairs_and_classifies(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(DEMO, num_labels=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, attn_implementation="eager")
        zoo.perturb_weights(model)
    model, tokenizer = model.eval().requires_grad_(False), AutoTokenizer.from_pretrained(DEMO)
    pairs = [model(**tokenizer(TEXTS[0], text, return_tensors="pt")).logits[0].sigmoid().item() for text in TEXTS[1:]]
    alone = [model(**tokenizer(text, return_tensors="pt")).logits[0].sigmoid().item() for text in TEXTS]
    with serving(model=str(saved(model, tmp_path / "ranker"))) as server:
        answer = server.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()
        assert [each["score"] for each in answer["data"]] == pytest.approx(pairs, abs=1e-4)
        data = server.post("/classify", {"input": TEXTS}).json()["data"]
        assert [each["probs"][0] for each in data] == pytest.approx(alone, abs=1e-4)
        assert data[0]["label"] == "LABEL_0" and data[0]["num_classes"] == 1
        with pytest.raises(openai.BadRequestError, match="returns no embeddings"):
            server.client().embeddings.create(model="ranker", input="a")


def test_generating_server_says_what_to_start(server: ServerProcess) -> None:
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/rerank", {"query": "a", "documents": ["b"]})):
        answer = server.post(path, body)
        assert answer.status_code == 400 and "runner=pooling" in answer.json()["error"]["message"]
