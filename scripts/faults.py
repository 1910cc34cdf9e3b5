"""Plant faults in a copy of the tree, one at a time, and show that each turns its test red.

A fault replaces one piece of text by another. A piece that is no longer there, or a test that does
not pass without the fault, is reported too: such a fault would show nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 240
RESUME = "tests/integration/test_resume.py"
CHANNELS = "tests/integration/test_channels.py"
YIELDS = "tests/loops/test_yielding.py"
AVERAGES = "tests/plugins/test_averaging.py"
ELASTIC = "tests/distributed/test_elastic.py"
SAME_BITS = f"{ELASTIC}::test_any_number_of_processes_gives_the_same_bits"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One planted fault: what breaks, where, and the test that must see it."""

    name: str
    file: str
    good: str
    bad: str
    test: str


FAULTS = (
    Fault(
        "the cursor is one batch behind",
        "helios/state.py",
        "        self.batch += 1\n        self.sample += num_samples",
        "        self.batch += self.batch > 0\n        self.sample += num_samples",
        f"{RESUME}::test_a_run_by_steps_resumes_everywhere[plain]",
    ),
    Fault(
        "no re-seeding before the fetch",
        "helios/data/source.py",
        "        rng.reseed(self._keys.at(self._batch))",
        "        self._keys.at(self._batch)",
        f"{RESUME}::test_workers_change_no_bit[from 0 to 2 workers]",
    ),
    Fault(
        "no re-seeding before the iteration",
        "helios/engines/turns.py",
        "        rng.reseed(self._before.at(iteration))",
        "        self._before.at(iteration)",
        f"{RESUME}::test_workers_change_no_bit[from 0 to 2 workers]",
    ),
    Fault(
        "the epoch is missing in the key of the order",
        "helios/data/samplers.py",
        "self.seed, self.epoch)\n        # Not len(self)",
        "self.seed)\n        # Not len(self)",
        "tests/data/test_samplers.py",
    ),
    Fault(
        "the random module is not re-seeded",
        "helios/core/rng.py",
        "    random.seed(seed)\n    if _Default",
        "    if _Default",
        f"{RESUME}::test_workers_change_no_bit[from 0 to 2 workers]",
    ),
    Fault(
        "later epochs lose their head after a resume",
        "helios/state.py",
        "        self.batch = 0\n        self.sample = 0",
        "        self.batch = 0",
        f"{RESUME}::test_a_run_by_steps_resumes_everywhere[plain]",
    ),
    Fault(
        "schedulers are not loaded",
        "helios/model/discovery.py",
        '            if path in state["objects"]:',
        '            if path in state["objects"] and "scheduler" not in path:',
        f"{RESUME}::test_a_run_by_steps_resumes_everywhere[plain]",
    ),
    Fault(
        "tables are not loaded",
        "helios/startup/run.py",
        "            table.update(tables[name])",
        "            pass",
        f"{RESUME}::test_a_run_by_steps_resumes_everywhere[plain]",
    ),
    Fault(
        "the generators are not restored",
        "helios/session.py",
        "            rng.load_rng_state_dict(self.saved_randomness)",
        "            pass",
        f"{RESUME}::test_a_hook_behind_the_safe_point_draws_the_same_numbers",
    ),
    Fault(
        "frozen layers stay frozen after a resume",
        "helios/model/discovery.py",
        '            load_flags(state["flags"], scene.found, parameters)',
        "            pass",
        f"{RESUME}::test_a_run_by_steps_resumes_everywhere[plain]",
    ),
    Fault(
        "open gradients are lost",
        "helios/model/discovery.py",
        '            load_grads(state["grads"], parameters)',
        "            pass",
        f"{RESUME}::test_every_safe_point_inside_an_epoch_resumes[manual with open gradients]",
    ),
    Fault(
        "the partial window is divided by the full count",
        "helios/engines/engine.py",
        "        count = self._open_micro_batches * self.replicas.num_replicas\n",
        "        count = 3 if self._open_micro_batches > 1 else 1\n",
        "tests/engines/test_engine.py::"
        "test_gradients_are_the_mean_over_the_batches_really_in_the_window",
    ),
    Fault(
        "the poll behind the safe point is skipped after a resume",
        "helios/loops/epoch.py",
        "            self.leave_safe_point(has_validated=has_validated)\n        else:",
        "            pass\n        else:",
        f"{RESUME}::test_a_run_by_steps_resumes_everywhere[plain]",
    ),
    Fault(
        "an epoch's start is told again after a resume",
        "helios/session.py",
        "        return self.is_resumed and is_numbered and self.cursor.batch > 0",
        "        return False and is_numbered",
        f"{RESUME}::test_a_run_by_steps_resumes_everywhere[plain]",
    ),
    Fault(
        "a validation shifts the random numbers of training",
        "helios/session.py",
        "            with rng.stream(rng.key(self.seed, phase.value, pass_number)):\n"
        "                yield",
        "            yield",
        "tests/integration/test_evaluation.py",
    ),
    Fault(
        "the digest is not checked",
        "helios/checkpoint/loading.py",
        "        if digest_file(path) != sidecar.digest:",
        "        if False:",
        "tests/checkpoint/test_loading.py",
    ),
    Fault(
        "the commit comes before the sidecar",
        "helios/checkpoint/store.py",
        "            files.write_text_durably(layout.sidecar_path(path), filled.to_json())\n"
        "            files.replace(partial, path)",
        "            files.replace(partial, path)\n"
        "            files.write_text_durably(layout.sidecar_path(path), filled.to_json())",
        "tests/checkpoint/test_kills.py",
    ),
    Fault(
        "a damaged checkpoint is loaded by a silent fresh start",
        "helios/checkpoint/store.py",
        "        self._refuse_silent_restart(entries)",
        "        pass",
        "tests/integration/test_which_run.py",
    ),
    Fault(
        "the thread count is not restored",
        "helios/engines/numerics.py",
        "        if num_threads is not None and num_threads != threads:",
        "        if False:",
        f"{RESUME}::test_two_threads_stay_two_threads",
    ),
    Fault(
        "event files are not cut back",
        "helios/startup/outputs.py",
        '            marks=stored.get("events", {}) if is_training else None,',
        "            marks=None,",
        "tests/integration/test_logs.py",
    ),
    Fault(
        "plugins hear events after the model",
        "helios/hooks/events.py",
        'pme, pm, state = (P, M, E), (P, M), ("state",)',
        'pme, pm, state = (M, P, E), (M, P), ("state",)',
        "tests/hooks/test_events.py::"
        "test_plugins_come_first_monitors_right_after_the_model_and_the_engine_last",
    ),
    Fault(
        "another run's checkpoint is taken",
        "helios/startup/resume.py",
        "        _check_name(start.loaded, arguments.run_name or save_name, folder)",
        "        pass",
        "tests/integration/test_which_run.py",
    ),
    Fault(
        "monitors come before the model",
        "helios/hooks/events.py",
        "(P, M, MONITOR, E) if is_validation else pme",
        "(P, MONITOR, M, E) if is_validation else pme",
        "tests/hooks/test_bus.py::"
        "test_a_monitor_hears_the_end_of_a_validation_after_the_model_and_its_start_before",
    ),
    Fault(
        "the end of a forward pass is not told",
        "helios/loops/step.py",
        '    session.hooks.emit("on_forward_end", context)',
        "    pass",
        f"{CHANNELS}::test_channels_nest_in_a_training[by steps]",
    ),
    Fault(
        "on_training_resume is not told",
        "helios/loops/fit.py",
        '            session.hooks.emit("on_training_resume", session.state)\n',
        "",
        "tests/integration/test_event_logs.py::"
        "test_a_run_tells_what_was_written_down_by_hand[exception_after_resume]",
    ),
    Fault(
        "a new child loop does not adopt its predecessor's children",
        "helios/loops/loop.py",
        "                loop.adopt(present)",
        "                pass",
        "tests/loops/test_loop.py::test_a_new_child_keeps_the_children_of_the_old_one",
    ),
    Fault(
        "validation is not keyed",
        "helios/session.py",
        "        rng.reseed(rng.key(self.seed, self.phase.value, pass_number, step, *which))",
        "        pass",
        "tests/integration/test_several_loaders.py::"
        "test_the_scores_do_not_depend_on_who_fetches[workers0]",
    ),
    Fault(
        "a skipped step keeps its count",
        "helios/state.py",
        "        if self.is_step_committed and unit is TrainingUnit.ITERATION:",
        "        if False:",
        "tests/loops/test_loop.py::test_an_update_that_a_hook_leaves_out_is_withdrawn",
    ),
    Fault(
        "a skipped step repeats what was due at its count",
        "helios/schedule.py",
        "return state.is_step_committed and _is_multiple(",
        "return _is_multiple(",
        "tests/plugins/test_nan_guard.py::test_what_was_due_is_not_done_again_after_a_skipped_step",
    ),
    Fault(
        "EMA's count of updates is not saved",
        "helios/plugins/weights.py",
        'return {"num_updates": self.num_updates, ',
        'return {"num_updates": 0, ',
        f"{AVERAGES}::test_a_run_with_an_average_resumes_everywhere[manual steps]",
    ),
    Fault(
        "the average is not swapped out",
        "helios/plugins/weights.py",
        "                tensor.copy_(value)",
        "                pass",
        f"{AVERAGES}::test_a_validation_sees_the_average_in_the_same_parameters[iteration]",
    ),
    Fault(
        "an EMA is updated by steps that were left out",
        "helios/plugins/averaging.py",
        "        if committed and is_due:",
        "        if is_due:",
        f"{AVERAGES}::test_a_step_that_was_left_out_is_not_averaged",
    ),
    Fault(
        "YieldLoop lets gradients of one loss into all networks",
        "helios/loops/yielding.py",
        "            self._backward(loss, inputs)",
        "            self._backward(loss)",
        f"{YIELDS}::test_a_window_sums_each_optimizers_gradients_and_averages_them_apart",
    ),
    Fault(
        "a window's count is reset after the first optimizer",
        "helios/loops/yielding.py",
        "                    is_committed |= self._update_now(path, optimizer)\n",
        "                    is_committed |= self._update_now(path, optimizer)\n"
        "                    engine.close_window()\n",
        f"{YIELDS}::test_a_window_sums_each_optimizers_gradients_and_averages_them_apart",
    ),
    Fault(
        "an interruption is noted as finished",
        "helios/startup/fit.py",
        "            return False\n        if self._recorder is not None:",
        "            if self._recorder is not None:\n"
        '                self._recorder.finish("interrupted")\n'
        "            return False\n        if self._recorder is not None:",
        f"{CHANNELS}::test_an_interruption_leaves_all_scopes_and_a_restart_enters_them_again",
    ),
    Fault(
        "an interrupted run tells on_training_epoch_end",
        "helios/loops/epoch.py",
        "        if self._is_left_unfinished:",
        "        if False:",
        "tests/plugins/test_time_limit.py::test_the_ways_out_are_told_and_the_ends_are_not",
    ),
    Fault(
        "a context that was entered is not left after an exception",
        "helios/plugins/channels.py",
        "            self._scopes.unwind(exception=exception)",
        "            self._scopes = Scopes()",
        "tests/plugins/test_channels.py::"
        "test_after_an_exception_every_exit_sees_it_innermost_scope_first",
    ),
    Fault(
        "the exits of contexts run in reverse",
        "helios/hooks/scopes.py",
        "    for hook in hooks:\n        try:",
        "    for hook in reversed(list(hooks)):\n        try:",
        "tests/plugins/test_channels.py::"
        "test_contexts_are_left_in_the_order_in_which_they_are_entered",
    ),
    Fault(
        "a second owner of a batch is accepted",
        "helios/hooks/bus.py",
        "            if len(owners) > 1:",
        "            if False:",
        "tests/hooks/test_bus.py::test_a_second_owner_of_a_batch_is_an_error_that_names_both",
    ),
    Fault(
        "a limit on batches is not compared at a resume",
        "helios/startup/resume.py",
        '"sampler", "limit_batches")',
        '"sampler")',
        "tests/plugins/test_trials.py::"
        "test_a_changed_limit_stops_a_resume_and_the_epoch_goes_on_where_it_stood_if_allowed",
    ),
    Fault(
        "a CSV file is not cut back",
        "helios/core/rows.py",
        '                files.truncate(self._path, mark["size"])',
        "                pass",
        "tests/core/test_rows.py::test_a_file_is_cut_back_to_its_mark_and_goes_on",
    ),
    Fault(
        "a metric's state is not saved",
        "helios/plugins/holders.py",
        "{name: holder.capture() for name, holder in self._holders.items()}",
        "{}",
        "tests/plugins/test_metrics.py::test_the_state_of_a_metric_is_whole",
    ),
    Fault(
        "a trial validation leaves its scores",
        "helios/loops/trial.py",
        "Trace([session.model, session.engine, *",
        "Trace([session.engine, *",
        "tests/plugins/test_metrics.py::test_a_trial_validation_leaves_nothing_behind",
    ),
    Fault(
        "the NaN guard names the samples of a later batch",
        "helios/hooks/context.py",
        "        return dataclasses.replace(self._run.cursor)",
        "        return self._run.cursor",
        "tests/plugins/test_nan_guard.py::"
        "test_a_window_over_the_end_of_an_epoch_names_batches_of_both",
    ),
    Fault(
        "early stopping counts what is no validation of a training",
        "helios/plugins/early_stopping.py",
        "        if not self._is_training:\n            return",
        "        if False:\n            return",
        "tests/plugins/test_early_stopping.py::"
        "test_trial_validations_and_those_outside_of_fit_do_not_count",
    ),
    Fault(
        "gradients are added by a stock all-reduce",
        "helios/engines/reduce.py",
        "                if self._distances is None:\n                    self._send_chunks(parts)",
        "                if self._distances is None:\n"
        "                    for part in parts[1:]:\n"
        "                        parts[0].add_(part)\n"
        "                    dist.all_reduce(parts[0])",
        f"{SAME_BITS}[3-3-1]",
    ),
    Fault(
        "a node of the tree splits after the first half, rounded down",
        "helios/engines/tree.py",
        "    middle = node.start + (len(node) + 1) // 2",
        "    middle = node.start + len(node) // 2",
        "tests/engines/test_tree.py",
    ),
    Fault(
        "each process divides its own sum",
        "helios/engines/gradients.py",
        "        leaf = self._flat.collect(self._leaves.pop(replica, None))",
        "        leaf = self._flat.collect(self._leaves.pop(replica, None))\n"
        "        for flat in leaf.flats:\n"
        "            flat.div_(3.0).mul_(3.0)",
        "tests/engines/test_gradients.py",
    ),
    Fault(
        "the buffers of the last replica are committed",
        "helios/engines/buffers.py",
        "        if 0 in self._own:\n            self._put(self._own[0])",
        "        pass",
        f"{SAME_BITS}[4-2-2]",
    ),
    Fault(
        "a replica goes on with the buffers of the one before it",
        "helios/engines/turns.py",
        "        self._buffers.enter(replica)\n        rng",
        "        rng",
        "tests/engines/test_turns.py",
    ),
    Fault(
        "all replicas draw the same numbers in a step",
        "helios/engines/turns.py",
        "suffix=(r,)) for r in replicas.block}",
        "suffix=(replicas.block.start,)) for r in replicas.block}",
        f"{SAME_BITS}[4-2-2]",
    ),
    Fault(
        "hooks draw on the numbers of the last replica",
        "helios/engines/turns.py",
        "        rng.reseed(self._after.at(self._iteration))",
        "        pass",
        f"{SAME_BITS}[4-3-1]",
    ),
    Fault(
        "replicas fetch under the key of the first one",
        "helios/data/shared.py",
        "        self._keys = [replace(place, replica=replica).fetch_keys() "
        "for replica in deal.share.block]",
        "        self._keys = [replace(place, replica=deal.share.block.start).fetch_keys() "
        "for replica in deal.share.block]",
        f"{SAME_BITS}[4-3-1]",
    ),
    Fault(
        "evaluation counts padded samples",
        "helios/data/deal.py",
        "        if not self.share.pads or not surplus:",
        "        if not surplus:",
        "tests/data/test_shared.py",
    ),
    Fault(
        "the losses of a process are taken for the mean of all",
        "helios/loops/replicas.py",
        "            losses.append({n: _copy_of(loss) for n, loss in "
        "session.model.loss_items.items()})",
        "            losses = [{n: _copy_of(loss) for n, loss in "
        "session.model.loss_items.items()}] * len(session.replicas.block)",
        f"{SAME_BITS}[4-2-2]",
    ),
    Fault(
        "what one process asks for is not told to the others",
        "helios/session.py",
        "        if self.replicas.is_lone:\n            self.agreed = asked\n",
        "        if True:\n            self.agreed = asked\n",
        "tests/loops/test_replicas.py::test_what_one_process_asks_for_ends_the_run_on_all",
    ),
    Fault(
        "a step that the scaler leaves out counts",
        "helios/engines/engine.py",
        "            if not scaler.is_finite(optimizer):",
        "            if not scaler.is_finite(optimizer) and False:",
        "tests/engines/test_scaler.py",
    ),
    Fault(
        "the scale is not loaded",
        "helios/engines/scaler.py",
        "        self._scaler.load_state_dict(",
        "        dict(",
        "tests/engines/test_scaler.py",
    ),
    Fault(
        "a process does not get its own parts back",
        "helios/startup/own_parts.py",
        "    own = by_rank[replicas.rank]",
        "    own = by_rank[0]",
        "tests/distributed/test_own_parts.py",
    ),
    Fault(
        "weights are not compared over processes",
        "helios/session.py",
        "            check_alike(self.model, gather, ignored=self.unshared)",
        "            gather(None)",
        "tests/loops/test_replicas.py",
    ),
    Fault(
        "what is asked for behind a safe point counts at once",
        "helios/session.py",
        "        return bool(self.agreed.stop_reason or self.agreed.interruption)",
        "        return bool(self.requests.stop_reason or self.requests.interruption)",
        f"{ELASTIC}::test_what_is_asked_for_behind_a_safe_point_waits_for_the_next",
    ),
    Fault(
        "only the first turn is watched",
        "helios/loops/replicas.py",
        "turns.is_watched = not self._has_watched or number & (number - 1) == 0",
        "turns.is_watched = not self._has_watched",
        "tests/loops/test_replicas.py",
    ),
)


def _copy(target: Path) -> None:
    skipped = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "*.egg-info")
    shutil.copytree(ROOT, target, ignore=skipped)


def _passes(tree: Path, test: str) -> bool:
    # The copy comes first on the path, before the installed package.
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    command += ["-m", "not full and not gpu"]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{test} could not be run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def _try(fault: Fault) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        _copy(tree)
        file = tree / fault.file
        text = file.read_text()
        if text.count(fault.good) != 1:
            return f"cannot be planted: its text is there {text.count(fault.good)} times"
        file.write_text(text.replace(fault.good, fault.bad))
        return "NOT SEEN" if _passes(tree, fault.test) else "seen"


def main() -> int:
    """Plant all faults, or those whose name holds a given text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="plant only faults whose name holds one of these")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    names = arguments.names or [""]
    chosen = [fault for fault in FAULTS if any(name in fault.name for name in names)]
    tests = sorted({fault.test for fault in chosen})
    with ThreadPoolExecutor(arguments.jobs) as pool:
        passing = pool.map(lambda test: _passes(ROOT, test), tests)
        broken = [test for test, passes in zip(tests, passing, strict=True) if not passes]
        for test in broken:
            print(f"FAILS WITHOUT A FAULT  {test}")
        results = list(pool.map(_try, chosen))
    for fault, result in zip(chosen, results, strict=True):
        print(f"{result:10} {fault.name:55} {fault.test}")
    seen = results.count("seen")
    print(f"{seen} of {len(chosen)} faults are seen.")
    return 0 if seen == len(chosen) and not broken else 1


if __name__ == "__main__":
    sys.exit(main())
