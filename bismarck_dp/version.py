"""The one place that states the version; packaging and the extension's control file read it."""

__version__ = "0.2.0"
