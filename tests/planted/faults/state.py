"""Faults in what a checkpoint holds, when it is taken, and what a resume puts back."""

from __future__ import annotations

from tests.planted.planting import fault

RESUME = "tests/integration/test_resume.py"
RESUMED = f"{RESUME}::test_a_run_by_steps_resumes_everywhere[plain]"
ALIASES = "tests/state/test_aliases.py::test_an_attribute_names_the_network_that_it_named"
REFERENCES = "tests/state/test_references.py"


@fault(
    "helios.hooks.context:Context.request_checkpoint",
    "tests/loops/test_replicas.py::test_a_checkpoint_that_one_process_asks_for_is_taken_by_all",
)
def a_request_for_a_checkpoint_is_lost(request_checkpoint, context):
    context._parts.agreement.check_open("Context.request_checkpoint()")


@fault(
    "helios.requests:SharedAgreement._ask",
    "tests/loops/test_replicas.py::test_what_one_process_asks_for_ends_the_run_on_all",
)
def what_one_process_asks_for_is_not_told_to_the_others(ask, agreement):
    found = ask(agreement)
    agreement._run.agreed.stop_reason = agreement._run.asked.stop_reason
    return (found[0], False, False, found[3])


@fault("helios.loops.boundary:Boundary.resume", RESUMED)
def a_resume_does_not_repeat_the_poll_behind_its_safe_point(resume, boundary, kind):
    boundary.check_limits()
    return boundary._run.is_leaving


@fault(
    "helios.start.resume:PendingLoad.finish",
    "tests/integration/test_resume.py::test_a_hook_behind_the_safe_point_draws_the_same_numbers",
)
def generators_are_not_restored(finish, pending, is_complete):
    from helios.core import rng

    pending._randomness = rng.read_states()
    finish(pending, is_complete)


@fault("helios.state.restoring:load_into", RESUMED)
def optimizers_are_not_loaded(load_into, path, value, state):
    from torch.optim import Optimizer

    if not isinstance(value, Optimizer):
        load_into(path, value, state)


@fault("helios.state.walk:Walk.find", ALIASES)
def a_place_names_the_object_that_setup_has_put_there(find, walk, name):
    return find(walk, "nets.1" if name == "nets.2" else name)


@fault(
    "helios.storage.building:Builder._present",
    "tests/state/test_changes.py::test_plain_members_beside_networks_come_back_in_place",
)
def a_container_is_replaced_where_closures_refer_to_it(present, builder, path, kind):
    return builder._enter(path, kind())


@fault(
    "helios.storage.plain_objects:make_bare",
    f"{REFERENCES}::test_building_an_object_runs_no_code_of_its_class",
)
def building_an_object_calls_its_constructor(make_bare, kind):
    return kind()


@fault(
    "helios.state.discovery:Discovery._changed_values",
    "tests/state/test_shared_view_sizes.py::test_memory_beyond_the_limit_is_named_and_tensors_resume",
)
def what_is_too_large_to_save_is_not_named(changed_values, *args):
    return changed_values(*args)[0], {}


@fault(
    "helios.checkpoint.capture:_take_own_part",
    "tests/distributed/test_own_parts.py::test_as_many_processes_go_on_each_with_its_own",
)
def every_process_gets_what_rank_0_had(take_own_part, record, replicas):
    return record


@fault(
    "helios.start.level:Reproducibility.level_after",
    "tests/start/test_levels.py::test_a_state_that_is_not_kept_makes_the_level_incomplete_everywhere",
)
def what_is_missing_does_not_lower_the_level(level_after, found, record, **more):
    return found.level


CHANGED = "tests/integration/test_changed_start.py"


@fault(
    "helios.core.code_digest:_tag",
    f"{CHANGED}::test_an_edited_method_is_named",
)
def a_constant_that_has_another_type_is_the_same(tag, value):
    return "" if isinstance(value, int | float) else tag(value)
