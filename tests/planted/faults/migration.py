"""Faults in how files of earlier versions are read and replaced."""

from __future__ import annotations

from tests.planted.planting import fault

KILLS = "tests/migration/test_migration_kills.py"


@fault("helios.storage.codec:write_file", KILLS)
def a_migrated_file_is_not_written_beside_the_old_one(write_file, path, tree, *, hashes=False):
    import shutil

    final = path.with_suffix("")
    digest = write_file(final, tree, hashes=hashes)
    shutil.copyfile(final, path)
    return digest


@fault(
    "helios.migration.helios_ml:_CONVERTERS",
    "tests/test_chkpt_migrator.py"
    "::test_a_dictionary_that_a_script_saved_with_the_present_state_is_migrated",
)
def the_migrator_does_not_know_the_present_class_of_the_counters(converters):
    from helios.migration import helios_ml

    return {name: make for name, make in converters.items() if name != helios_ml._PRESENT_STATE}


@fault("helios.migration.folder_migration:_Migration._complete", KILLS)
def a_sidecar_that_a_kill_has_left_out_is_not_completed(complete, migration, path, types):
    from helios.migration import folder_migration

    return folder_migration.Report(path, folder_migration.Result.CURRENT)
