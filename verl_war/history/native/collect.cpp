// Eviction: whole segments die at once; then heads and links are swept in slices, so that none leads into a dead page
// when the dead pages go back to the operating system.
#include <algorithm>

#include "index.h"

namespace verl_war {

namespace {

constexpr double kLowWater = 0.9;  // evict to this share of max_bytes, so that sweeps are rare

}  // namespace

bool Index::collect(int64_t units, bool forced) {
    if (phase_ == Phase::kIdle && !start_cycle(forced)) return false;
    while (units > 0 && phase_ != Phase::kIdle) {
        if (!cycle_step(units)) return true;
    }
    return true;
}

// Marks what goes. False when there is nothing to do.
bool Index::start_cycle(bool forced) {
    if (bytes() > options.max_bytes && static_cast<int64_t>(slots_.size()) > live_segments_) choose_victims();
    const bool something = !dead_pages_.empty() || !dead_slots_.empty();
    if (!(forced ? something || own_stale_ : something && bytes() > options.max_bytes)) return false;
    doomed_pages_.swap(dead_pages_);
    doomed_slots_.swap(dead_slots_);
    std::sort(doomed_pages_.begin(), doomed_pages_.end());
    for (uint32_t id : doomed_pages_) arena_.set_state(id, kDoomed);
    own_stale_ = false;
    phase_ = Phase::kHeads;
    sweep_chain_ = 0;
    sweep_at_ = 0;
    return true;
}

// Finished segments, oldest policy step first, then least recently used.
void Index::choose_victims() {
    struct Victim {
        int64_t step;
        uint64_t last_used;
        uint32_t slot;
        bool operator<(const Victim& other) const {  // heap: the first to go on top
            return step != other.step ? step > other.step : last_used > other.last_used;
        }
    };
    std::vector<Victim> heap;
    for (uint32_t slot = 0; slot < segments_.size(); ++slot) {
        const Segment& segment = segments_[slot];
        if (segment.alive && !segment.live) heap.push_back({segment.step, segment.last_used, slot});
    }
    std::make_heap(heap.begin(), heap.end());
    const double target = kLowWater * static_cast<double>(options.max_bytes);
    const double per_page = static_cast<double>(bytes()) / std::max<int64_t>(1, arena_.pages_in_use());
    while (!heap.empty()) {
        const double kept = static_cast<double>(arena_.pages_in_use() - static_cast<int64_t>(dead_pages_.size()));
        if (kept * per_page <= target) return;
        std::pop_heap(heap.begin(), heap.end());
        Segment& segment = segments_[heap.back().slot];
        ++evicted_segments_;
        evicted_tokens_ += segment.length - segment.first;
        kill(heap.back().slot);
        heap.pop_back();
    }
}

// One small piece of the cycle; false when the cycle ended.
bool Index::cycle_step(int64_t& units) {
    switch (phase_) {
        case Phase::kHeads: {
            Heads& heads = heads_[sweep_chain_];
            const size_t stop = std::min(heads.buckets(), sweep_at_ + 256);
            units -= static_cast<int64_t>(stop - sweep_at_) + 1;
            for (; sweep_at_ < stop; ++sweep_at_) {
                Position& head = heads.at(sweep_at_);
                int64_t hops = 0;
                head = skip_useless(sweep_chain_, head, hops);
                units -= 16 * hops;
            }
            if (sweep_at_ < heads.buckets()) return true;
            sweep_at_ = 0;
            if (++sweep_chain_ == kNumChains) {
                phase_ = Phase::kLinks;
                sweep_at_ = 1;
            }
            return true;
        }
        case Phase::kLinks:
            if (sweep_at_ < arena_.end()) {
                sweep_page(static_cast<uint32_t>(sweep_at_++), units);
            } else {
                phase_ = Phase::kRelease;
            }
            return true;
        case Phase::kRelease:
            release_some(units);
            if (!doomed_pages_.empty()) return true;
            for (uint32_t slot : doomed_slots_) {
                segments_[slot] = Segment{};
                free_slots_.push_back(slot);
            }
            doomed_slots_.clear();
            phase_ = Phase::kShrink;
            sweep_chain_ = 0;
            return true;
        case Phase::kShrink:
            for (int i = 0; i < 16; ++i) {
                if (merge_one(sweep_chain_)) {
                    units -= 8;
                    continue;
                }
                heads_[sweep_chain_].trim();
                if (++sweep_chain_ == kNumChains) {
                    phase_ = Phase::kIdle;
                    return false;
                }
            }
            return true;
        case Phase::kIdle:
            break;
    }
    return false;
}

void Index::sweep_page(uint32_t id, int64_t& units) {
    units -= 2;
    const uint8_t state = arena_.state(id);
    if (state == kFree || state == kDoomed) return;
    const uint32_t used = arena_.info(id).used;
    units -= kNumChains * static_cast<int64_t>(used);
    for (int chain = 0; chain < kNumChains; ++chain) {
        Position* links = arena_.page(id).link[chain];
        // Useless entries are skipped only from useful ones: every run of them is then walked once, from its front.
        // The others must still not lead into doomed pages, because a useful one may lead to them until the next cycle.
        const bool useful = state == kUsed || (state == kFinished && chain != kOwnChain);
        for (uint32_t i = 0; i < used; ++i) {
            if (links[i] == 0) continue;
            int64_t hops = 0;
            if (useful ? useless(chain, links[i]) : doomed(links[i])) {
                links[i] = useful ? skip_useless(chain, links[i], hops) : skip_doomed(chain, links[i], hops);
                units -= 16 * hops;  // a hop is a cache miss, a link in the sweep is not
            }
        }
    }
}

void Index::release_some(int64_t& units) {
    // From the end, in runs of consecutive pages.
    size_t count = 1;
    const size_t size = doomed_pages_.size();
    if (size == 0) return;
    while (count < size && count < 256 && doomed_pages_[size - count - 1] + 1 == doomed_pages_[size - count]) ++count;
    arena_.release(doomed_pages_[size - count], static_cast<uint32_t>(count));
    doomed_pages_.resize(size - count);
    units -= 256 + 64 * static_cast<int64_t>(count);
}

void Index::check() const {
    int64_t kept = 0, in_use = 0;
    for (uint32_t id = 1; id < arena_.end(); ++id) in_use += arena_.state(id) != kFree;
    for (const Segment& segment : segments_) {
        for (uint32_t id : segment.pages) kept += id != 0 ? arena_.info(id).used : 0;
    }
    if (kept != tokens_) throw std::logic_error("tokens: " + std::to_string(kept) + " in pages, " +
                                                std::to_string(tokens_) + " counted");
    if (in_use != arena_.pages_in_use()) throw std::logic_error("pages in use are miscounted");
    for (int chain = 0; chain < kNumChains; ++chain) {
        const Heads& heads = heads_[chain];
        int64_t seen = 0;
        for (size_t bucket = 0; bucket < heads.buckets(); ++bucket) {
            for (Position at = heads.at(bucket); at != 0; at = link_of(chain, at)) {
                const uint32_t id = at >> kPageShift;
                if (id >= arena_.end() || arena_.state(id) == kFree) throw std::logic_error("a link into a free page");
                if ((at & (kPageTokens - 1)) >= arena_.info(id).used) throw std::logic_error("a link behind the text");
                if (!useless(chain, at)) ++seen;
                if (seen > entries_[chain]) throw std::logic_error("a chain holds more entries than were indexed");
            }
        }
    }
}

}  // namespace verl_war
