"""Starting the processes of a run: torchrun, srun or spawn; supervising them; passing values.

Nothing here may know what the processes compute.
"""
