"""A run from a file: reading, checking and building its configuration, and the commands that do so."""

from omnitrain.config.configuration import Config

__all__ = ["Config"]
