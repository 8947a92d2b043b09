"""What runs first inside the sandbox: it sets the limits, says that it started, and becomes the program.

Only its source text is used: it is given to the interpreter inside the sandbox, which may be another one than ours. So
it imports nothing of this package and keeps to the standard library of old Pythons. The limits are set here, and not
before, because the number of processes is counted within the user namespace that exists only now; they are hard limits,
which nothing in the sandbox has the right to raise.
"""

import os
import resource
import sys

Module = type(sys)


def main() -> None:
    """Read the order from the arguments: descriptor, limits, exit code for want of memory, kind, program.

    Plain text, because the import of a parser would take as long as the start of the interpreter.
    """
    started, limits, memory_exit_code, kind, *command = sys.argv[1:]
    for limit in limits.split(","):
        name, soft, hard = limit.split(":")
        resource.setrlimit(getattr(resource, name), (int(soft), int(hard)))
    os.umask(0o077)
    os.write(int(started), b"1")
    os.close(int(started))
    if kind == "command":
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr)
            os._exit(127)
    sys.argv[:] = command
    with open(command[0], encoding="utf-8") as file:
        source = file.read()
    module = Module("__main__")
    module.__dict__["__file__"] = command[0]
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    try:
        exec(compile(source, command[0], "exec"), module.__dict__)
    except MemoryError:
        module.__dict__.clear()
        sys.stderr.write("MemoryError\n")
        sys.stderr.flush()
        os._exit(int(memory_exit_code))


if __name__ == "__main__":
    main()
