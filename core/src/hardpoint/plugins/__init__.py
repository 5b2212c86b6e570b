"""The plugin system: kinds, import-free discovery, the plan, each process's runtime, and the doctor."""
