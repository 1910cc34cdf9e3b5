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


COMMAND_LINE = "tests/cli/test_train_command.py"


@fault(
    "helios.cli.arguments:_refuse_name",
    f"{COMMAND_LINE}::test_a_mistake_names_option_and_value_before_anything_is_created",
)
def an_unknown_option_names_no_other_one(refuse_name, name, known):
    return f"There is no option --{name}."


@fault(
    "helios.cli.config_file:without_nested_secrets",
    f"{COMMAND_LINE}::test_secrets_are_not_written_and_must_be_passed_again",
)
def the_file_of_a_run_holds_secrets(without_nested_secrets, tree):
    return tree
