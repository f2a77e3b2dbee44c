// What the binding files share: arguments, the gate together with the GIL, appending in slices.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "index.h"

namespace verl_war {

namespace py = pybind11;

constexpr int64_t kSliceTokens = 250;  // appended under one hold of the gate: about 0.1 ms
constexpr auto kSliceTime = std::chrono::microseconds(200);
// Eviction work per appended token when over the limit: a cycle is over before its tenth of the text has come anew.
constexpr int64_t kUnitsPerToken = 128;

void bind_exchange(py::class_<Index>& index);

using Int32s = py::array_t<int32_t, py::array::c_style>;
using Int64s = py::array_t<int64_t, py::array::c_style>;
using Floats = py::array_t<float, py::array::c_style>;

// Runs `work` (no Python in it) inside the gate. Keeps the GIL when nobody is inside: taking it back from another
// Python thread could last 5 ms. Never waits for the GIL inside the gate.
template <typename Work>
auto guarded(Index& index, Work work) {
    struct Leave {
        Gate& gate;
        ~Leave() { gate.leave(); }
    };
    if (index.gate.try_enter(Urgency::kDecode)) {
        Leave leave{index.gate};
        return work();
    }
    py::gil_scoped_release release;
    Entered entered(index.gate, Urgency::kDecode);
    return work();
}

template <typename T>
py::array_t<T, py::array::c_style> array_of(const py::object& given, const char* name) {
    if (!py::isinstance<py::array_t<T>>(given) || py::cast<py::array>(given).ndim() != 1) {
        const std::string found = py::isinstance<py::array>(given)
            ? "a " + std::to_string(py::cast<py::array>(given).ndim()) + "-dimensional array of dtype " +
              py::cast<std::string>(py::str(py::cast<py::array>(given).dtype()))
            : py::cast<std::string>(py::str(py::type::of(given)));
        throw std::invalid_argument(std::string(name) + " is " + found + "; expected a one-dimensional array of dtype " +
                                    py::cast<std::string>(py::str(py::dtype::of<T>())));
    }
    return py::array_t<T, py::array::c_style>::ensure(given);
}

template <typename T>
py::array_t<T> to_array(const std::vector<T>& values) {
    return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

inline void require(bool ok, const std::string& message) {
    if (!ok) throw std::invalid_argument(message);
}

// GIL released, gate not held. Evicts until nothing is left to do, or for about this long; `forced`: also when under
// max_bytes.
inline bool collect_in_slices(Index& index, double max_ms, bool forced) {
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    while (true) {
        {
            Entered entered(index.gate, Urgency::kBulk);
            const auto slice = Clock::now();
            bool more = true;
            while (more && Clock::now() - slice < kSliceTime) more = index.collect(2048, forced);
            if (!more) return true;
        }
        const std::chrono::duration<double, std::milli> elapsed = Clock::now() - begin;
        if (max_ms >= 0.0 && elapsed.count() >= max_ms) return false;
    }
}

// GIL released, gate not held.
inline void append_in_slices(Index& index, int64_t key, const int32_t* tokens, int64_t count, Urgency urgency) {
    for (int64_t done = 0; done < count;) {
        const int64_t slice = std::min(kSliceTokens, count - done);
        {
            Entered entered(index.gate, urgency);
            // Text of another replica can be evicted between two slices.
            if (urgency == Urgency::kBulk && !index.contains(key)) return;
            index.append(key, tokens + done, slice);
            index.collect(kUnitsPerToken * slice, false);
        }
        done += slice;
        // Nobody waits for bulk work: evict now rather than refuse text later.
        if (urgency == Urgency::kBulk) collect_in_slices(index, -1.0, false);
    }
}

inline void check_offsets(const int64_t* offsets, int64_t rows, int64_t tokens) {
    require(offsets[0] == 0 && offsets[rows] == tokens,
            "offsets run from " + std::to_string(offsets[0]) + " to " + std::to_string(offsets[rows]) +
                "; expected 0 to " + std::to_string(tokens) + ", the number of tokens");
    for (int64_t i = 0; i < rows; ++i) {
        require(offsets[i] <= offsets[i + 1], "offsets[" + std::to_string(i + 1) + "]=" +
                                                  std::to_string(offsets[i + 1]) + " is less than the one before");
    }
}

}  // namespace verl_war
