"""Faults in what is said of mistakes in scripts."""

from __future__ import annotations

from tests.planted.planting import fault


@fault("helios.start.options:as_local_path", "tests/storage/test_local_paths.py")
def a_url_is_a_folder_for_the_trainer(as_local_path, name, value):
    from pathlib import Path

    return Path(value)


@fault(
    "helios.start.options:_refuse_unknown",
    "tests/start/test_arguments.py::test_an_unknown_argument_names_the_one_that_is_meant",
)
def an_unknown_argument_names_no_other_one(refuse, name):
    return f"Trainer() has no argument {name!r}."


IDLE = "tests/integration/test_idle_steps.py"


@fault("helios.state.steps:IdleWatch.conclude", IDLE)
def a_run_that_learns_nothing_is_saved(conclude, watch, iteration, *, is_manual):
    pass


@fault("helios.core.loss_means:LossMeans._warn_of_nonfinite", "tests/loops/test_nonfinite_loss.py")
def a_loss_that_is_not_finite_is_not_said(warn_of_nonfinite, means, name, value, first):
    pass


@fault("helios.core.loss_means:_join", "tests/integration/test_mean_losses.py")
def what_is_logged_is_that_of_the_first_replica(join, tables):
    return dict(next(iter(tables), {}))


OPTIONS = "tests/start/test_options.py"


@fault(
    "helios.start.changes:describe_identity",
    f"{OPTIONS}::test_another_value_stops_a_resume_if_it_defines_the_run[train_unit]",
)
def a_run_is_resumed_in_another_unit(identity, options, description, engine):
    found = identity(options, description, engine)
    return {name: value for name, value in found.items() if name != "train_unit"}


@fault(
    "helios.start.options:Options.plain",
    f"{OPTIONS}::test_ranks_that_differ_are_told_by_the_name_of_the_option[hang_timeout]",
)
def ranks_may_differ_in_when_they_give_up(plain, options, name):
    return None if name == "hang_timeout" else plain(options, name)


@fault("helios.hooks.context:Context.__setattr__", "tests/hooks/test_context_read_only.py")
def what_a_hook_assigns_to_the_context_is_kept_apart(set_attribute, context, name, value):
    return


@fault(
    "helios.hooks.bus:_accepts",
    "tests/hooks/test_bus_signatures.py::test_a_step_may_leave_out_what_follows_the_batch",
)
def what_a_step_leaves_out_is_passed_to_it(accepts, signature, in_place, by_name):
    return True


COMMAND_LINE = "tests/cli/test_train_command.py"


@fault(
    "helios.cli.mistakes:Mistakes._refuse_name",
    f"{COMMAND_LINE}::test_a_mistake_names_option_value_and_remedy_before_anything_is_created",
)
def an_unknown_option_names_no_other_one(refuse_name, mistakes, name):
    return f"There is no option --{name}."


@fault(
    "helios.cli.config_file:ConfigFile._keep",
    f"{COMMAND_LINE}::test_other_values_are_refused_and_leave_the_file_alone",
)
def the_options_of_a_run_are_lost_when_others_are_allowed(keep, plugin, path):
    pass


@fault(
    "helios.cli.config_file:without_nested_secrets",
    f"{COMMAND_LINE}::test_secrets_are_not_written_and_must_be_passed_again",
)
def the_file_of_a_run_holds_secrets(without_nested_secrets, tree):
    return tree
