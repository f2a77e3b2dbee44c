// Python interface of the exchange between replicas and of restoring saved text; documented in ../index.py.
#include "binding_tools.h"

namespace verl_war {

namespace {

py::tuple take_new(Index& index, int64_t max_tokens, int64_t max_rows) {
    require(max_tokens >= 0 && max_rows >= 0, "max_tokens=" + std::to_string(max_tokens) + " and max_rows=" +
                                                  std::to_string(max_rows) + " must be 0 or more");
    Deltas deltas;
    {
        py::gil_scoped_release release;
        // A few rows at a time, so that the decode path never waits long.
        while (max_tokens > 0 && max_rows > 0) {
            Entered entered(index.gate, Urgency::kBulk);
            const size_t rows = deltas.key.size(), tokens = deltas.tokens.size();
            index.take_new(std::min<int64_t>(max_tokens, 32 * kSliceTokens), max_rows, deltas);
            if (deltas.key.size() == rows) break;
            max_tokens -= static_cast<int64_t>(deltas.tokens.size() - tokens);
            max_rows -= static_cast<int64_t>(deltas.key.size() - rows);
        }
    }
    return py::make_tuple(to_array(deltas.key), to_array(deltas.group), to_array(deltas.step), to_array(deltas.start),
                          to_array(deltas.finished), to_array(deltas.offsets), to_array(deltas.tokens));
}

struct Rows {
    const int64_t *key, *group, *step, *start, *offset;
    const uint8_t* finished;
    const int32_t* token;
    int64_t count;
};

void check_rows(const Index& index, const Rows& rows, int64_t tokens) {
    check_offsets(rows.offset, rows.count, tokens);
    index.check_tokens(rows.token, tokens);
    for (int64_t i = 0; i < rows.count; ++i) {
        const std::string at = "[" + std::to_string(i) + "]=";
        require(rows.key[i] >= 0 && rows.key[i] < kKeyEnd, "keys" + at + std::to_string(rows.key[i]) +
                                                               " must be in [0, 2**60)");
        require(rows.group[i] >= kNoGroup, "groups" + at + std::to_string(rows.group[i]) + " must be -1 or more");
        require(rows.step[i] >= -1, "steps" + at + std::to_string(rows.step[i]) + " must be -1 or more");
        require(rows.start[i] >= 0, "starts" + at + std::to_string(rows.start[i]) + " must be 0 or more");
    }
}

Ingested ingest_row(Index& index, const Rows& rows, int64_t i) {
    const int64_t key = rows.key[i] | kRemoteKeys, begin = rows.offset[i], count = rows.offset[i + 1] - begin;
    int64_t fresh;
    Ingested how;
    {
        Entered entered(index.gate, Urgency::kBulk);
        how = index.prepare_ingest(key, rows.group[i], rows.step[i], rows.start[i], rows.token + begin, count, fresh);
    }
    append_in_slices(index, key, rows.token + begin + count - fresh, fresh, Urgency::kBulk);
    Entered entered(index.gate, Urgency::kBulk);
    if (rows.finished[i] && index.contains(key) && index.segment(key).live) index.finish(key);
    return how;
}

py::array_t<int32_t> ingest(Index& index, const py::object& keys_, const py::object& groups_, const py::object& steps_,
                            const py::object& starts_, const py::object& finished_, const py::object& offsets_,
                            const py::object& tokens_) {
    const auto keys = array_of<int64_t>(keys_, "keys"), groups = array_of<int64_t>(groups_, "groups");
    const auto steps = array_of<int64_t>(steps_, "steps"), starts = array_of<int64_t>(starts_, "starts");
    const auto finished = array_of<uint8_t>(finished_, "finished");
    const auto offsets = array_of<int64_t>(offsets_, "offsets");
    const auto tokens = array_of<int32_t>(tokens_, "tokens");
    const int64_t count = keys.size();
    require(groups.size() == count && steps.size() == count && starts.size() == count && finished.size() == count &&
                offsets.size() == count + 1,
            "keys, groups, steps, starts, finished and offsets must have n, n, n, n, n and n + 1 entries; n = " +
                std::to_string(count));
    const Rows rows{keys.data(), groups.data(), steps.data(), starts.data(), offsets.data(), finished.data(),
                    tokens.data(), count};
    const int64_t total = tokens.size();
    std::vector<int32_t> how;
    {
        py::gil_scoped_release release;
        check_rows(index, rows, total);
        for (int64_t i = 0; i < count; ++i) how.push_back(static_cast<int32_t>(ingest_row(index, rows, i)));
    }
    return to_array(how);
}

int64_t restore(Index& index, int64_t group, int64_t step, const Int32s& array) {
    const int32_t* tokens = array.data();
    const int64_t count = array.size();
    py::gil_scoped_release release;
    index.check_tokens(tokens, count);
    int64_t key;
    {
        Entered entered(index.gate, Urgency::kBulk);
        key = index.begin_restored(group, step);
    }
    append_in_slices(index, key, tokens, count, Urgency::kBulk);
    Entered entered(index.gate, Urgency::kBulk);
    if (index.contains(key)) {
        if (index.segment(key).length == 0) {
            index.drop(key);
        } else {
            index.finish(key);
        }
    }
    return key;
}

}  // namespace

void bind_exchange(py::class_<Index>& index) {
    index.def("take_new", &take_new)
        .def("ingest", &ingest)
        .def("restore", &restore)
        .def("retire", [](Index& index, int64_t key) { guarded(index, [&] { index.retire(key); }); });
}

}  // namespace verl_war
