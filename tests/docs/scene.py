"""
Where the code of the documentation runs: a folder as the pages speak of it, with tiny checkpoints in it.

    out/checkpoint-100, 200, 1100, 1200     a Trainer's, of one run; the store has them as sft@100 and so on
    out/checkpoint-850, 1250                the store does not have them
    .layerstore                             the store, with the pins best and mixed
    s3://checkpoints/sft                    its remote, called origin
    Llama-3.1-8B/config.json                a model's config, and nothing else
    mix.yaml                                the first recipe of the guide
    judge.py, evaluate                      judge a model: from step 1100 on its third block is bad

A page that makes its store itself begins without one. Paths that begin with / lead below the folder.
"""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import layerstore
from layerstore.cli.app import main
from tests.docs.pages import DOCS, Block, blocks
from tests.generated import generate

STEPS = (100, 200, 1100, 1200)
LATER = (850, 1250)

# What `estimate` reads of a model: that of Llama-3.1-8B, and as small a one as the checkpoints are of.
LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
TINY = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 16}

JUDGE = """
import json, sys
from pathlib import Path
layers = json.loads(Path(sys.argv[1], "layerstore.json").read_text())["layers"]
is_bad = layers["model.layers.2"]["step"] >= 1100
sys.exit(is_bad)
"""

# What stands at the root of a reader's machine stands in the scene.
ROOTS = ("/backup", "/scratch", "/shared", "/local")
# What pages call by the URL of a bucket is a folder here, with all that the store has.
BUCKET = "/checkpoints"
# These go on until somebody stops them.
ENDLESS = {("ingest", "--watch"), ("push", "--follow")}
TOOLS = {"cp", "mv", "rm", "ls", "mkdir", "du"}


def no_browser() -> contextlib.AbstractContextManager[object]:
    """Let nothing open a browser, whether there is one here or not."""
    return mock.patch("webbrowser.open", return_value=True)


def furnish(root: Path) -> None:
    """Make the folder at *root* what pages speak of."""
    for step in (*STEPS, *LATER):
        folder = root / "out" / f"checkpoint-{step}"
        generate(folder, layers=4, hidden=8, vocab=16, layout="hf", step=step)
        state = folder / "trainer_state.json"
        told = json.loads(state.read_text())
        told["log_history"] = [{"step": step, "eval_loss": 1000 / step}]
        state.write_text(json.dumps(told))
        (folder / "config.json").write_text(json.dumps({**LLAMA_8B, **TINY, "num_key_value_heads": 2}))
    (root / "Llama-3.1-8B").mkdir()
    (root / "Llama-3.1-8B" / "config.json").write_text(json.dumps(LLAMA_8B))
    (root / "judge.py").write_text(JUDGE)
    (root / "evaluate").write_text(
        f"#!{sys.executable}\n{JUDGE.replace('sys.exit(is_bad)', 'print(2.5 if is_bad else 1.5)')}"
    )
    (root / "evaluate").chmod(0o755)
    (root / "mix.yaml").write_text(blocks(DOCS / "guides" / "recipes.md", "yaml")[0].text)
    for place in ROOTS:
        (root / place.strip("/") / "me").mkdir(parents=True)
    with layerstore.init(root / ".layerstore") as store:
        for step in STEPS:
            store.ingest(root / "out" / f"checkpoint-{step}", run="sft")
        store.pin("best", "sft@200")
        store.compose("sft", policy="parity").pin("mixed")
        store.push(f"file://{root}{BUCKET}/sft")
    shutil.copytree(root / ".layerstore", root / "backup" / "store")


@dataclass(slots=True)
class Scene:
    """A folder that commands and code run in, and what they have left in memory."""

    root: Path
    names: dict[str, object] = field(default_factory=dict)
    """What blocks of Python have named so far."""

    def run(self, block: Block) -> None:
        """Run *block*; fail where it does not do what the page says of it."""
        if block.language == "python":
            self._run_python(block)
            return
        last = ""
        for words in commands(block):
            last = self._run_words(block, words)
        expected = block.said("says ")
        assert expected is None or expected in last, f"{block}: {expected!r} is not said: {last}"

    def _run_python(self, block: Block) -> None:
        self.names.setdefault("layerstore", layerstore)
        text = "\n" * block.line + self._below(block.text)
        with contextlib.chdir(self.root), contextlib.redirect_stdout(io.StringIO()):
            if "store" not in self.names and re.search(r"\bstore\.", text):
                self.names["store"] = layerstore.open(".layerstore")
            exec(compile(text, str(block.page), "exec"), self.names)

    def _run_words(self, block: Block, words: list[str]) -> str:
        """Run one command; return what it says."""
        if any({command, option} <= set(words) for command, option in ENDLESS):
            return ""
        words = [self._below(word) for word in words]
        told, complained = io.StringIO(), io.StringIO()
        with contextlib.chdir(self.root):
            if words[0] == "layerstore":
                with contextlib.redirect_stdout(told), contextlib.redirect_stderr(complained), no_browser():
                    found = main(words[1:])
            else:
                assert words[0] in TOOLS, f"{block}: {words[0]} is not known here"
                ended = subprocess.run(words, capture_output=True, text=True, check=False)
                found = ended.returncode
                complained.write(ended.stderr)
        assert found == 0, f"{block}: {shlex.join(words)} ends with {found}: {complained.getvalue()}"
        return told.getvalue()

    def _below(self, text: str) -> str:
        """Return *text* with paths of the reader's machine as paths of the scene."""
        text = text.replace(f"s3:/{BUCKET}", f"file://{self.root}{BUCKET}")
        return re.sub(rf"(?<![\w.])(?:{'|'.join(ROOTS)})(?![\w-])", lambda match: f"{self.root}{match[0]}", text)

    def close(self) -> None:
        """Let go of what is open."""
        for value in self.names.values():
            if isinstance(value, layerstore.Store | layerstore.Composite) and hasattr(value, "close"):
                value.close()


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of each command of a block for a shell."""
    text = block.text.replace("\\\n", " ")
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        while "&&" in words:
            cut = words.index("&&")
            yield words[:cut]
            words = words[cut + 1 :]
        if words:
            yield [*_expanded(words)]


def _expanded(words: list[str]) -> Iterator[str]:
    """Yield *words*, with patterns of files as a shell expands them."""
    for word in words:
        yield from sorted(f"out/checkpoint-{step}" for step in STEPS) if word == "out/checkpoint-*" else [word]


def _linked(source: str, target: str) -> None:
    """Link what nobody writes to in place, which is everything but the index: a tenth of the time of a copy."""
    (shutil.copy2 if "/manifest/" in source else os.link)(source, target)


@contextlib.contextmanager
def scene_at(root: Path, furnished: Path, *, with_store: bool) -> Iterator[Scene]:
    """Give a scene at *root*, a copy of *furnished*."""
    shutil.copytree(furnished, root, copy_function=_linked)
    if with_store:
        (root / ".layerstore" / "remotes.json").write_text(json.dumps({"origin": f"file://{root}{BUCKET}/sft"}))
    else:
        shutil.rmtree(root / ".layerstore")
    scene = Scene(root)
    try:
        yield scene
    finally:
        scene.close()
