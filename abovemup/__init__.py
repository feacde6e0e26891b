"""abovemup: initialise, update and scale a language model so that one learning rate fits every size."""

__version__ = "0.1.0"
