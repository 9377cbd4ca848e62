// Files of the runner's user: arrays of numpy's formats .npy and .npz.
#pragma once
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "runner/npy.h"

namespace hybridc {

// Names, and the bytes of a .npy file of each.
using EncodedArrays = std::vector<std::pair<std::string, std::string>>;

bool IsNpz(const std::string& path);

// Throws HC530 for a file that is missing or no such file.
Array ReadNpy(const std::string& path);

// The arrays of a file that numpy.savez has written, by their names. Throws HC530 likewise, and for one that is
// compressed.
std::map<std::string, Array> ReadNpz(const std::string& path);

// Whole, or not at all. Throws HC531.
void WriteNpy(const std::string& path, const std::string& encoded);
void WriteNpz(const std::string& path, EncodedArrays arrays);

}  // namespace hybridc
