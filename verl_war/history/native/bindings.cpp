// Python interface; documented in ../index.py.
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>

#include "binding_tools.h"

namespace verl_war {

namespace {

constexpr int kApiVersion = 3;

Urgency urgency_of(int64_t count) { return count > kSliceTokens ? Urgency::kBulk : Urgency::kDecode; }

void begin(Index& index, int64_t key, int64_t group, int64_t step, const Int32s& prompt) {
    const int32_t* tokens = prompt.data();
    const int64_t count = prompt.size();
    require(key < kKeyEnd, "key=" + std::to_string(key) + " must be under 2**60");
    py::gil_scoped_release release;
    index.check_tokens(tokens, count);
    {
        Entered entered(index.gate, Urgency::kDecode);
        index.begin(key, group, step, count);
    }
    try {
        append_in_slices(index, key, tokens, count, urgency_of(count));
    } catch (const std::bad_alloc&) {
        Entered entered(index.gate, Urgency::kDecode);
        if (index.contains(key)) index.drop(key);
        throw;
    }
}

int64_t extend(Index& index, int64_t key, int64_t start, const Int32s& array) {
    const int32_t* tokens = array.data();
    const int64_t count = array.size();
    if (count <= 64) {
        index.check_tokens(tokens, count);
        return guarded(index, [&] {
            const int64_t known = index.check_extend(key, start, tokens, count);
            index.append(key, tokens + known, count - known);
            index.collect(kUnitsPerToken * count, false);
            return index.segment(key).length;
        });
    }
    py::gil_scoped_release release;
    index.check_tokens(tokens, count);
    int64_t known;
    {
        Entered entered(index.gate, Urgency::kDecode);
        known = index.check_extend(key, start, tokens, count);
    }
    append_in_slices(index, key, tokens + known, count - known, urgency_of(count));
    Entered entered(index.gate, Urgency::kDecode);
    return index.segment(key).length;
}

void extend_batch(Index& index, const py::object& keys_, const py::object& starts_, const py::object& offsets_,
                  const py::object& tokens_) {
    const auto keys = array_of<int64_t>(keys_, "keys"), starts = array_of<int64_t>(starts_, "starts");
    const auto offsets = array_of<int64_t>(offsets_, "offsets");
    const auto tokens = array_of<int32_t>(tokens_, "tokens");
    const int64_t rows = keys.size();
    require(starts.size() == rows && offsets.size() == rows + 1,
            "keys, starts and offsets have " + std::to_string(rows) + ", " + std::to_string(starts.size()) + " and " +
                std::to_string(offsets.size()) + " entries; expected n, n and n + 1");
    const int64_t *key = keys.data(), *start = starts.data(), *offset = offsets.data();
    const int32_t* token = tokens.data();
    check_offsets(offset, rows, tokens.size());
    const int64_t total = tokens.size();
    py::gil_scoped_release release;
    index.check_tokens(token, total);
    std::vector<int64_t> known(static_cast<size_t>(rows)), sorted(key, key + rows);
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    require(twice == sorted.end(), "keys has " + (twice == sorted.end() ? "" : std::to_string(*twice)) +
                                       " twice; expected every key once");
    {
        Entered entered(index.gate, Urgency::kDecode);
        for (int64_t i = 0; i < rows; ++i) {
            known[i] = index.check_extend(key[i], start[i], token + offset[i], offset[i + 1] - offset[i]);
        }
    }
    for (int64_t i = 0; i < rows;) {
        Entered entered(index.gate, Urgency::kDecode);
        int64_t slice = 0;
        for (; i < rows && slice < kSliceTokens; ++i) {
            // At most one slice of this row here; a long rest goes on below.
            const int64_t begin = offset[i] + known[i], count = std::min(kSliceTokens, offset[i + 1] - begin);
            index.append(key[i], token + begin, count);
            known[i] += count;
            slice += count;
            if (offset[i] + known[i] < offset[i + 1]) break;
        }
        index.collect(kUnitsPerToken * slice, false);
    }
}

void check_limits(int64_t max_tokens, double min_prob) {
    require(max_tokens >= 0 && max_tokens <= 4096,
            "max_tokens=" + std::to_string(max_tokens) + " must be between 0 and 4096");
    require(min_prob >= 0.0 && min_prob <= 1.0, "min_prob=" + std::to_string(min_prob) + " must be between 0 and 1");
}

py::tuple as_tuple(const Drafts& drafts) {
    return py::make_tuple(to_array(drafts.offsets), to_array(drafts.tokens), to_array(drafts.probs),
                          to_array(drafts.match_length), to_array(drafts.source), to_array(drafts.votes),
                          to_array(drafts.score));
}

py::tuple draft(Index& index, int64_t key, int64_t max_tokens, double min_prob, const py::object& context) {
    check_limits(max_tokens, min_prob);
    Drafts drafts;
    Int32s given;
    const bool at_end = context.is_none();
    if (!at_end) {
        given = array_of<int32_t>(context, "context");
        index.check_tokens(given.data(), given.size());
    }
    const int32_t* tokens = at_end ? nullptr : given.data();
    const int64_t count = at_end ? 0 : given.size();
    // An empty context matches nothing; its data may be null, which would mean the end.
    const int most = at_end || count > 0 ? static_cast<int>(max_tokens) : 0;
    guarded(index, [&] { index.draft(key, most, min_prob, tokens, count, drafts); });
    return as_tuple(drafts);
}

py::tuple draft_batch(Index& index, const py::object& keys_, const py::object& max_tokens_, double min_prob) {
    const auto keys = array_of<int64_t>(keys_, "keys");
    const auto max_tokens = array_of<int32_t>(max_tokens_, "max_tokens");
    const int64_t rows = keys.size();
    require(max_tokens.size() == rows, "keys and max_tokens have " + std::to_string(rows) + " and " +
                                           std::to_string(max_tokens.size()) + " entries; expected as many");
    const int64_t* key = keys.data();
    const int32_t* most = max_tokens.data();
    Drafts drafts;
    {
        py::gil_scoped_release release;
        for (int64_t i = 0; i < rows; ++i) check_limits(most[i], min_prob);
        Entered entered(index.gate, Urgency::kDecode);
        for (int64_t i = 0; i < rows; ++i) index.draft(key[i], most[i], min_prob, nullptr, 0, drafts);
    }
    return as_tuple(drafts);
}

void set_acceptance(Index& index, const py::array_t<float, py::array::c_style>& table) {
    require(table.ndim() == 2 && table.shape(0) == kNumSources &&
                table.shape(1) == static_cast<py::ssize_t>(kMatchBuckets.size()),
            "the acceptance table must have " + std::to_string(kNumSources) + " rows and " +
                std::to_string(kMatchBuckets.size()) + " columns");
    for (py::ssize_t i = 0; i < table.size(); ++i) {
        const float value = table.data()[i];
        require(value >= 0.0f && value <= 1.0f,  // also false for NaN
                "the acceptance table has " + std::to_string(value) + " at row " +
                    std::to_string(i / static_cast<py::ssize_t>(kMatchBuckets.size())) + "; expected 0 to 1");
    }
    const float* values = table.data();
    guarded(index, [&] { index.set_acceptance(values); });
}

bool collect(Index& index, double max_ms) {
    py::gil_scoped_release release;
    return collect_in_slices(index, max_ms, true);
}

py::array_t<int32_t> text(Index& index, int64_t key, int64_t start, int64_t end) {
    std::vector<int32_t> out;
    guarded(index, [&] {
        const Segment& segment = index.segment(key);
        const int64_t from = start == -1 ? segment.first : start, to = end == -1 ? segment.length : end;
        require(segment.first <= from && from <= to && to <= segment.length,
                "offsets [" + std::to_string(from) + ", " + std::to_string(to) + ") of key=" + std::to_string(key) +
                    " are not kept; expected within [" + std::to_string(segment.first) + ", " +
                    std::to_string(segment.length) + ")");
        out.resize(static_cast<size_t>(to - from));
        index.copy_text(segment, from, to, out.data());
    });
    return to_array(out);
}

py::dict stats(Index& index) {
    const Stats stats = guarded(index, [&] { return index.stats(); });
    py::dict out;
    out["bytes"] = stats.bytes;
    out["tokens"] = stats.tokens;
    out["segments"] = stats.segments;
    out["live_segments"] = stats.live_segments;
    out["live_tokens"] = stats.live_tokens;
    out["evicted_segments"] = stats.evicted_segments;
    out["evicted_tokens"] = stats.evicted_tokens;
    out["refused_tokens"] = stats.refused_tokens;
    out["drafts"] = stats.drafts;
    out["drafted_tokens"] = stats.drafted_tokens;
    return out;
}

std::unique_ptr<Index> make(int64_t vocab_size, int64_t max_bytes, const std::array<int, kNumChains>& min_match,
                            int max_match_tokens, int max_candidates, double age_decay, double vote_prior,
                            uint32_t source_mask) {
    require(vocab_size >= 1 && vocab_size <= INT32_MAX,
            "vocab_size=" + std::to_string(vocab_size) + " must be between 1 and 2**31 - 1");
    require(max_bytes >= 1 << 20, "max_bytes=" + std::to_string(max_bytes) + " must be at least 1048576 (1 MiB)");
    for (int length : min_match) {
        require(length >= 1 && length <= kMaxGram, "min_match=" + std::to_string(length) + " must be between 1 and 8");
        require(length <= max_match_tokens, "max_match_tokens=" + std::to_string(max_match_tokens) +
                                                " must be at least min_match=" + std::to_string(length));
    }
    require(max_match_tokens <= kMaxContext,
            "max_match_tokens=" + std::to_string(max_match_tokens) + " must be at most 256");
    require(max_candidates >= 1 && max_candidates <= 256,
            "max_candidates=" + std::to_string(max_candidates) + " must be between 1 and 256");
    require(age_decay > 0.0 && age_decay <= 1.0,
            "age_decay=" + std::to_string(age_decay) + " must be over 0 and at most 1");
    require(vote_prior > 0.0 && vote_prior <= 1000.0,
            "vote_prior=" + std::to_string(vote_prior) + " must be over 0 and at most 1000");
    return std::make_unique<Index>(Options{vocab_size, max_bytes, min_match, max_match_tokens, max_candidates,
                                           age_decay, vote_prior, source_mask});
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "C++ part of verl_war.history; use verl_war.history.index.";
    module.attr("API_VERSION") = kApiVersion;
    module.attr("MATCH_BUCKETS") = std::vector<int>(kMatchBuckets.begin(), kMatchBuckets.end());
    module.def("match_bucket", [](int length) {
        require(length >= 1, "match_length=" + std::to_string(length) + " must be at least 1");
        return match_bucket(length);
    });
    py::register_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const UnknownKey& error) {
            PyErr_SetString(PyExc_KeyError, error.what());
        }
    });
    py::class_<Index> index(module, "Index");
    bind_exchange(index);
    index.def(py::init(&make), py::kw_only(), py::arg("vocab_size"), py::arg("max_bytes"), py::arg("min_match"),
             py::arg("max_match_tokens"), py::arg("max_candidates"), py::arg("age_decay"), py::arg("vote_prior"),
             py::arg("source_mask"))
        .def("begin", &begin)
        .def("extend", &extend)
        .def("extend_batch", &extend_batch)
        .def("common_prefix", [](Index& index, int64_t key, const Int32s& tokens) {
            const int32_t* data = tokens.data();
            const int64_t count = tokens.size();
            return guarded(index, [&] { return index.common_prefix(key, data, count); });
        })
        .def("draft", &draft)
        .def("draft_batch", &draft_batch)
        .def("set_acceptance", &set_acceptance)
        .def("finish", [](Index& index, int64_t key) { guarded(index, [&] { index.finish(key); }); })
        .def("drop", [](Index& index, int64_t key) { guarded(index, [&] { index.drop(key); }); })
        .def("set_step", [](Index& index, int64_t step, int64_t window_steps) {
            return guarded(index, [&] { return index.set_step(step, window_steps); });
        })
        .def("collect", &collect)
        .def("contains", [](Index& index, int64_t key) { return guarded(index, [&] { return index.contains(key); }); })
        .def("num_segments", [](Index& index) { return guarded(index, [&] { return index.stats().segments; }); })
        .def("keys", [](Index& index) { return to_array(guarded(index, [&] { return index.keys(); })); })
        .def("info", [](Index& index, int64_t key) {
            const Segment segment = guarded(index, [&] { return index.segment(key); });
            return py::make_tuple(segment.group, segment.step, segment.first, segment.length, segment.live,
                                  segment.frozen);
        })
        .def("text", &text)
        .def("stats", &stats)
        .def("check", [](Index& index) { guarded(index, [&] { index.check(); }); });
}

}  // namespace verl_war
