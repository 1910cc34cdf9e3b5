"""The reproducibility checklist of a paper, filled in as far as the files of a run say.

Its topics are those that machine-learning conferences ask for. What Helios cannot know is left to
the author: a wrong answer would be worse than none.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from helios.ledger.run_facts import RunFacts
from helios.text import number_text, with_step

# What Python names instead of a script for -c, for its prompt, and for standard input.
_NO_FILES = ("", "-", "-c")
_KERNELS = ("ipykernel_launcher.py", "colab_kernel_launcher.py", "ipython", "ipython3")
_PEAKS = {
    "gpu_memory": "GPU",
    "vm_hwm": "main memory",
    "memory": "main memory by ru_maxrss, or that of the process that has started it",
}
_HASH = "The hash of the last line of the ledger, which covers all iterations:"


# A question with what is known; None for a line that the author fills in.
_Question = tuple[str, str | None]


def make_checklist(run: RunFacts, *, fingerprint: str | None) -> dict[str, dict[str, str | None]]:
    """Return the checklist of a run: answers, or ``None`` for the author, by topic and question.

    Args:
        run: what is known of it.
        fingerprint: the hash of the last line of its ledger.
    """
    facts = run.facts
    return {
        "Code": dict(_ask_code(facts)),
        "Data": dict(_ask_data(facts)),
        "Seeds and exactness": dict(_ask_seeds(facts, fingerprint)),
        "Model and hyper-parameters": dict(_ask_model(facts)),
        "Results and number of runs": dict(_ask_results(run)),
        "Compute resources": dict(_ask_compute(run)),
        "Software": dict(_ask_software(facts)),
        "Licences, limitations and impact": dict(_ask_rest()),
    }


def _ask_code(facts: Mapping[str, Any]) -> Iterator[_Question]:
    yield "The exact command:", command_text(facts)
    yield "The version of the code:", git_text(facts)
    code = facts.get("code")
    text = f"{len(code)}, with hashes in run.json" if code else None
    yield "Number of source files that the run imported, besides installed packages:", text
    yield "Where is the code published, and under which licence?", None


def _ask_data(facts: Mapping[str, Any]) -> Iterator[_Question]:
    data = facts.get("data", {})
    text = ", ".join(f"{name} {value}" for name, value in data.items() if name != "fingerprint")
    yield "The training data, as the run describes it:", text or None
    yield "The fingerprint of the data set:", _text(data.get("fingerprint"))
    yield "Where can the data be obtained, and under which licence?", None
    yield "Which samples are for training, validation and test, and how were they chosen?", None
    yield "What was done to the data before training?", None
    yield "Did people consent, where the data is about people?", None


def _ask_seeds(facts: Mapping[str, Any], fingerprint: str | None) -> Iterator[_Question]:
    seeds = facts.get("seeds", {})
    text = ", ".join(f"{name} {value}" for name, value in seeds.items())
    yield "The seeds:", text or None
    yield "The level of reproducibility:", _text(facts, "level", "text")
    switches = facts.get("switches", {})
    names = ("deterministic_algorithms", "cudnn_benchmark", "matmul_precision", "threads")
    text = ", ".join(f"{name} {switches[name]}" for name in names if name in switches)
    yield "Settings that change rounding:", text or None
    yield _HASH, fingerprint


def _ask_model(facts: Mapping[str, Any]) -> Iterator[_Question]:
    text = "; ".join(
        f"{name} {counts['all']:,} ({counts['trainable']:,} trainable)"
        for name, counts in facts.get("parameters", {}).items()
    )
    yield "Parameters of each network:", text or None
    options = facts.get("options")
    where = f"{len(options)} options of the trainer, in the section on options" if options else None
    yield "Options of the training:", where
    yield "Hyper-parameters that the code of the model sets:", None
    yield "How were hyper-parameters chosen: which values were tried, and by which score?", None


def _ask_results(run: RunFacts) -> Iterator[_Question]:
    scores, steps = run.find_scores(), run.find_steps()
    text = ", ".join(
        f"{name} {number_text(score)} at iteration {with_step(iteration, steps.get(iteration))}"
        for name, [*_, (iteration, score)] in scores.items()
    )
    yield "Scores of the last validation:", text or None
    yield "How is each score defined, and on which samples is it computed?", None
    yield (
        (
            "How many runs does each reported number come from? (This report describes one; "
            "`helios compare` computes mean, deviation and interval of several.)"
        ),
        None,
    )
    yield "What do error bars show: standard deviation, or an interval of the mean?", None


def _ask_compute(run: RunFacts) -> Iterator[_Question]:
    facts = run.facts
    yield "Processor or GPU:", device_text(facts)
    yield "Number of processes:", _text(facts, "processes", "number")
    yield "Time of the training:", time_text(run)
    yield "Peak memory of the first process:", memory_text(run)
    yield "Compute of the whole project, with experiments that are not reported:", None


def _ask_software(facts: Mapping[str, Any]) -> Iterator[_Question]:
    versions = facts.get("versions", {})
    text = ", ".join(
        f"{name} {versions[name]}"
        for name in ("python_build", "torch", "numpy", "helios")
        if name in versions
    )
    yield "Versions:", text or None
    text = ", ".join(f"{name} {version}" for name, version in find_libraries(facts))
    yield "Further packages that the run imported:", text or None
    yield "Operating system:", _join(facts.get("system", {}), "os", "kernel")


def _ask_rest() -> Iterator[_Question]:
    yield "Licences of code, data and models of others:", None
    yield "Limitations of the method and of the experiments:", None
    yield "Possible harm, and what was done against it:", None


def find_libraries(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and versions of the packages that the run has imported."""
    libraries = facts.get("libraries", {})
    return [(name, libraries[name]) for name in facts.get("imported", ()) if name in libraries]


def command_text(facts: Mapping[str, Any]) -> str | None:
    """Return the command line; ``None`` if it is unknown, or the code was not in a file."""
    command = facts.get("command", {})
    script = str(command.get("script", ""))
    if "module" in command:
        words = ["-m", str(command["module"])]
    elif script in _NO_FILES or PurePath(script).name in _KERNELS:
        return None
    else:
        words = [script]
    return shlex.join([*_launch_words(facts), *words, *command.get("arguments", ())])


def _launch_words(facts: Mapping[str, Any]) -> list[str]:
    """Return what comes before the script."""
    command = facts.get("command", {})
    count = facts.get("processes", {}).get("number", 1)
    here = command.get("processes_here", count)
    if command.get("launcher") == "torchrun":
        machines = [] if here == count else [f"--nnodes={-(-count // here)}"]
        return ["torchrun", *machines, f"--nproc-per-node={here}"]
    prefix = ["srun", f"--ntasks={count}"] if "launcher" in command else []
    optimize = ["-" + "O" * command["optimize"]] if "optimize" in command else []
    return [*prefix, "python", *optimize]


def git_text(facts: Mapping[str, Any]) -> str | None:
    """Return commit and branch; ``None`` if the code was not in a repository."""
    git = facts.get("git")
    if not git:
        return None
    where = f" of {git['remote']}" if "remote" in git else ""
    branch = f" (branch {git['branch']})" if "branch" in git else ""
    dirty = " with local changes, which run.json holds" if git.get("is_dirty") else ""
    return f"git commit {git.get('commit', 'unknown')}{where}{branch}{dirty}"


def device_text(facts: Mapping[str, Any]) -> str | None:
    """Return the names of GPUs and processor; ``None`` if both are unknown."""
    system = facts.get("system", {})
    names = [*facts.get("gpu", {}).get("devices", ()), system.get("cpu")]
    text = ", ".join(str(name) for name in names if name)
    cores = f" ({system['cores']} cores)" if text and "cores" in system else ""
    return text + cores or None


def time_text(run: RunFacts) -> str | None:
    """Return the time of the training; ``None`` if it is unknown."""
    if not run.times.lines:
        return None
    text = duration_text(run.times.seconds)
    if run.num_kills:
        return f"{text}, with repeated iterations, without the last seconds before each kill"
    return text


def memory_text(run: RunFacts) -> str | None:
    """Return the peaks of memory; ``None`` if they are unknown."""
    parts = []
    peaks = {key: max((line.get(key, 0) for line in run.times.lines), default=0) for key in _PEAKS}
    if peaks["vm_hwm"]:
        # What earlier versions noted may be the memory of another process.
        peaks["memory"] = 0
    for key, name in _PEAKS.items():
        if peaks[key]:
            parts.append(f"{peaks[key] / 2**30:.2f} GiB ({name})")
    return ", ".join(parts) or None


def duration_text(seconds: float) -> str:
    """Return a time in hours, minutes and seconds.

    Example:
        >>> duration_text(3725.2)
        '1 h 2 min 5 s'
    """
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    parts = [f"{hours} h" if hours else "", f"{minutes} min" if hours or minutes else ""]
    return " ".join([*filter(None, parts), f"{rest} s"])


def _text(table: Any, *keys: str) -> str | None:
    for key in keys:
        table = table.get(key) if isinstance(table, Mapping) else None
    return None if table is None else str(table)


def _join(table: Mapping[str, Any], *names: str) -> str | None:
    return " ".join(str(table[name]) for name in names if name in table) or None
