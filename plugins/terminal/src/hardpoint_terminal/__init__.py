"""Commands that run a model in this process and print to the terminal."""
