"""An artifact as a folder that runs where there is no Python: begin with `write.py`.

`program.py` says what its runs do, `build.py` compiles the runtime of `native/`: a library with the C
interface hybridc.h, and a runner that uses it. The steps of a plan are executed by the helper in the
artifact's library, as sessions of Python execute them.
"""

from hybridc.bundle.write import Bundle, write_bundle

__all__ = ["Bundle", "write_bundle"]
