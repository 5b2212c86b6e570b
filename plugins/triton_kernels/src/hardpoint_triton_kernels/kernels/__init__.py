"""The kernels, each module with its launchers. Importing a module here imports Triton."""
