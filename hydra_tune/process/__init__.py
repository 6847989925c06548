"""What trials share as threads of one process: forks, file locks, Ctrl-C, garbage collection. Imports only `errors`."""
