"""Running a suite's cells: preparing, measuring, estimating, reporting progress; and `bench policy check`."""
