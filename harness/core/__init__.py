"""Used by every other package: errors, files, devices, intervals, and finding policies and tasks by name."""
