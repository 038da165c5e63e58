"""How a user talks to Chairlift: start a server, stream text from it, probe it."""
