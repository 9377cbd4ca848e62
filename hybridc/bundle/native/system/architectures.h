// Which GPUs run code for which architectures, as hybridc/targets.py decides it.
#pragma once
#include <string>
#include <vector>

namespace hybridc {

// Whether a GPU of this compute capability can load code for `architectures`, with PTX of the oldest: machine code
// runs on GPUs of its major version and at least its minor one, PTX on all that are not older; code for sm_90a runs on
// no other, that for sm_100f on no other major version.
bool RunsOn(const std::vector<std::string>& architectures, int major, int minor);

}  // namespace hybridc
