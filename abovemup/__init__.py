"""abovemup: how should a language model be initialised, updated and scaled so that one learning rate fits every size?"""

__version__ = "0.1.0"
