"""Faults in what is said of mistakes in scripts."""

from __future__ import annotations

from tests.planted.planting import fault


@fault("helios.startup.trainer_options:as_local_path", "tests/storage/test_local_paths.py")
def a_url_is_a_folder_for_the_trainer(as_local_path, name, value):
    from pathlib import Path

    return Path(value)


@fault(
    "helios.startup.unknown_arguments:_refuse",
    "tests/startup/test_arguments.py::test_an_unknown_argument_names_the_one_that_is_meant",
)
def an_unknown_argument_names_no_other_one(refuse, name, known):
    return f"Trainer() has no argument {name!r}."


@fault("helios.data.stream_source:StreamSource.count_unused", "tests/integration/test_streams.py")
def samples_of_longer_parts_are_left_out_in_silence(count_unused, source):
    return None


IDLE = "tests/integration/test_idle_steps.py"


@fault("helios.state_graph.idle_watch:IdleWatch.refuse", IDLE)
def a_run_that_learns_nothing_is_saved(refuse, watch, iteration):
    pass


@fault("helios.state_graph.idle_watch:IdleWatch._mark_buffers", IDLE)
def tables_in_buffers_do_not_count_as_learned(mark_buffers, watch):
    return {}


@fault("helios.session:Session._warn_of_nonfinite", "tests/loops/test_nonfinite_loss.py")
def a_loss_that_is_not_finite_is_not_said(warn_of_nonfinite, session, name, value, first):
    pass


@fault("helios.core.loss_means:_join", "tests/integration/test_mean_losses.py")
def what_is_logged_is_that_of_the_first_replica(join, tables):
    return dict(next(iter(tables), {}))


@fault("helios.text:with_step", "tests/cli/test_steps_in_commands.py")
def an_iteration_hides_its_step(with_step, iteration, step):
    return str(iteration)


@fault(
    "helios.ledger.differences:LineComparison._set_step",
    "tests/cli/test_steps_in_commands.py::test_comparisons_show_the_step_beside_an_iteration",
)
def a_comparison_forgets_steps(set_step, found, name, step):
    set_step(found, name, None)


@fault("helios.startup.run_log:say_what_does_not_seed", "tests/startup/test_banner.py")
def a_seed_of_pytorch_is_taken_for_that_of_the_run(say_what_does_not_seed, torch_seed, seed):
    return


@fault(
    "helios.terminal.root_logger:_ScreenHandler.emit",
    "tests/terminal/test_gone_readers.py::test_a_process_without_stderr_trains",
)
def a_line_that_nobody_can_read_ends_the_training(emit, handler, record):
    from helios.terminal.screen import write_line

    write_line(handler.format(record))


@fault(
    "helios.cli.output:progress",
    "tests/cli/test_situations.py::test_long_work_shows_how_far_it_is_on_a_terminal_only",
)
def long_work_of_a_command_is_silent(progress, what, total=None, *, unit="B"):
    import contextlib

    return contextlib.nullcontext(lambda count: None)


OPTIONS = "tests/startup/test_trainer_options.py"


@fault(
    "helios.startup.run_identity:identity",
    f"{OPTIONS}::test_another_value_stops_a_resume_if_it_defines_the_run[train_unit]",
)
def a_run_is_resumed_in_another_unit(identity, options, description, engine):
    found = identity(options, description, engine)
    return {name: value for name, value in found.items() if name != "train_unit"}


@fault(
    "helios.startup.trainer_options:Options.plain",
    f"{OPTIONS}::test_ranks_that_differ_are_told_by_the_name_of_the_option[hang_timeout]",
)
def ranks_may_differ_in_when_they_give_up(plain, options, name):
    return None if name == "hang_timeout" else plain(options, name)


@fault("helios.hooks.context:Context.__setattr__", "tests/hooks/test_context_read_only.py")
def what_a_hook_assigns_to_the_context_is_kept_apart(set_attribute, context, name, value):
    return


MISTAKES = "tests/integration/test_mistakes.py"


@fault("helios.hooks.overrides:_check_kind", MISTAKES)
def what_only_helios_calls_may_be_overridden(check_kind, place, name, overridden):
    return


@fault("helios.loops.epoch:EpochLoop._refuse_other_counts", MISTAKES)
def a_hook_may_count_for_the_run(refuse_other_counts, loop, counted):
    return


@fault("helios.loops.override_checks:FirstUpdate.of", MISTAKES)
def an_engine_may_do_nothing(of, engine):
    return None


@fault("helios.loops.override_checks:OwnRound.end_backward", MISTAKES)
def gradients_may_vanish_before_an_update(end_backward, own):
    return
