"""What every other package may use: errors, files, devices, intervals, and finding policies and tasks by name."""
