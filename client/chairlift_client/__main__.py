"""python -m chairlift_client is the same as `chairlift`."""

from chairlift_client.cli import app

app()
