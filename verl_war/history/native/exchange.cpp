// Text that goes to other replicas and comes from them.
#include <algorithm>

#include "index.h"

namespace verl_war {

void Index::take_new(int64_t max_tokens, int64_t max_rows, Deltas& out) {
    const uint32_t slots = static_cast<uint32_t>(segments_.size());
    for (uint32_t i = 0; i < slots && max_tokens > 0 && max_rows > 0; ++i, ++take_at_) {
        if (take_at_ >= slots) take_at_ = 0;
        Segment& segment = segments_[take_at_];
        if (!segment.alive || segment.remote || segment.end_sent) continue;
        const int64_t from = std::max(segment.sent, segment.first);
        const int64_t count = std::min(segment.length - from, max_tokens);
        const bool ends = !segment.live && from + count == segment.length;
        if (count == 0 && !ends) continue;
        out.key.push_back(segment.key);
        out.group.push_back(segment.group);
        out.step.push_back(segment.step);
        out.start.push_back(segment.origin + from);
        out.finished.push_back(ends);
        const size_t at = out.tokens.size();
        out.tokens.resize(at + static_cast<size_t>(count));
        copy_text(segment, from, from + count, out.tokens.data() + at);
        out.offsets.push_back(static_cast<int64_t>(out.tokens.size()));
        segment.sent = from + count;
        segment.end_sent = ends;
        max_tokens -= count;
        --max_rows;
    }
}

Ingested Index::prepare_ingest(int64_t key, int64_t group, int64_t step, int64_t start, const int32_t* tokens,
                               int64_t count, int64_t& fresh) {
    fresh = count;
    Ingested how = Ingested::kApplied;
    if (contains(key)) {
        const Segment& segment = segments_[slot_of(key)];
        const int64_t end = segment.origin + segment.length;
        if (segment.frozen) {
            fresh = 0;
            return Ingested::kRefused;
        }
        if (start > end || start < 0) {
            how = Ingested::kGap;
        } else {
            const int64_t before = std::min(std::max<int64_t>(segment.origin - start, 0), count);
            const int64_t known = std::min(std::max<int64_t>(end - start, before), count);
            const int64_t at = std::max<int64_t>(start - segment.origin, 0);
            const bool same = compare(segment, at, tokens + before, known - before) == known - before;
            fresh = count - known;
            if (same && fresh == 0) return count == 0 && segment.live ? Ingested::kApplied : Ingested::kDuplicate;
            if (same && segment.live) return Ingested::kApplied;
            how = same ? Ingested::kGap : Ingested::kConflict;
            fresh = count;
        }
        // What came before stays as text of its own; a new segment begins here.
        retire(key);
    }
    begin(key, group, step, 0);
    Segment& segment = segments_[slot_of(key)];
    segment.remote = true;
    ++remote_live_segments_;
    segment.origin = start;
    return how;
}

void Index::retire(int64_t key) {
    const uint32_t slot = slot_of(key);
    if (segments_[slot].live) finish(key);
    Segment& segment = segments_[slot];
    // Its new key means nothing to other replicas: what was not sent yet is not sent any more. Theirs ends when a new
    // segment of the old key begins.
    segment.end_sent = true;
    slots_.erase(key);
    segment.key = retired_key();
    slots_.emplace(segment.key, slot);
}

int64_t Index::begin_restored(int64_t group, int64_t step) {
    const int64_t key = retired_key();
    begin(key, group, step, 0);
    segments_[slot_of(key)].remote = true;
    ++remote_live_segments_;
    return key;
}

}  // namespace verl_war
