// L1 as lines of four sectors, least recently used ones going first, whatever their set.

#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <list>
#include <unordered_map>

namespace gpu_model {

class L1 {
public:
    static constexpr double absent = std::numeric_limits<double>::infinity();

    explicit L1(int lines) : capacity_(lines) {}

    // When a sector is or will be there; absent if it is not even on its way. Its line becomes the latest.
    double &at(int64_t sector) {
        const int64_t tag = sector >> 2;
        auto found = index_.find(tag);
        if (found == index_.end()) {
            if (static_cast<int>(index_.size()) >= capacity_) {
                index_.erase(order_.back().tag);
                order_.pop_back();
            }
            order_.push_front({tag, {absent, absent, absent, absent}});
            found = index_.emplace(tag, order_.begin()).first;
        } else {
            order_.splice(order_.begin(), order_, found->second);
        }
        return found->second->ready[sector & 3];
    }

private:
    struct Line {
        int64_t tag;
        std::array<double, 4> ready;
    };

    int capacity_;
    std::list<Line> order_;
    std::unordered_map<int64_t, std::list<Line>::iterator> index_;
};

}  // namespace gpu_model
