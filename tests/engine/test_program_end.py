"""Programs that end, fork, or drop the engine while requests run."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, os, threading
from torchweave import LLM, SamplingParams

@atexit.register  # before the engine's own, and therefore called after it
def report():
    print("active", llm.engine.scheduler.num_active)
    last.join()
    print("answer", len(answers[1]))

FAST = {"device": "cpu", "torch_compile_config": {"enable_fullgraph": False}}
LONG = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
print("dropped", sum(len(each.token_ids) for each in LLM("demo", **FAST).stream("1+1=", LONG)))

llm = LLM("demo", **FAST)
answers = [[], []]
begun = [threading.Event(), threading.Event()]

def generate(number, prompt):
    for output in llm.stream(prompt, LONG):
        answers[number] += output.token_ids
        begun[number].set()

threading.Thread(target=generate, args=(0, "12+30="), daemon=True).start()
begun[0].wait()
if (child := os.fork()) == 0:
    try:
        llm.generate("1+1=")
    except RuntimeError as error:
        print("fork", "this process is a fork" in str(error))
    atexit.unregister(report)
    raise SystemExit(3)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
last = threading.Thread(target=generate, args=(1, "1+1="), daemon=True)
last.start()
begun[1].wait()
print("end")
"""


def test_requests_outlive_their_program_and_their_engines_last_reference() -> None:
    ended = subprocess.run([sys.executable, "-u", "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr and "terminate called" not in ended.stderr, ended
    assert ended.stdout.splitlines() == ["dropped 50", "fork True", "child 3", "end", "active 0", "answer 50"]
