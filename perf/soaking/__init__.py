"""The parts of soak.py: clients of all kinds, samples of what the server holds, the verdict."""
