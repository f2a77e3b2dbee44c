// Newest position of every bucket, in a table that grows and shrinks by one bucket at a time (linear hashing), so
// that no call ever waits for a rehash. Source: W. Litwin, "Linear Hashing", VLDB 1980.
#pragma once

#ifndef __linux__
#error "verl_war.history grows its tables with mremap, which only Linux has; vLLM runs on nothing else"
#endif

#include <sys/mman.h>

#include <cstdint>
#include <new>

#include "arena.h"

namespace verl_war {

class Heads {
public:
    static constexpr size_t kMinBuckets = 1024;

    Heads() {
        reserve(kMinBuckets);
        buckets_ = base_ = kMinBuckets;
    }
    ~Heads() { munmap(heads_, capacity_ * sizeof(Position)); }
    Heads(const Heads&) = delete;
    Heads& operator=(const Heads&) = delete;

    size_t buckets() const { return buckets_; }
    int64_t bytes() const { return static_cast<int64_t>(capacity_ * sizeof(Position)); }
    Position& at(size_t bucket) { return heads_[bucket]; }
    const Position& at(size_t bucket) const { return heads_[bucket]; }
    size_t bucket_of(uint64_t hash) const {
        size_t bucket = hash & (2 * base_ - 1);
        return bucket < buckets_ ? bucket : bucket & (base_ - 1);
    }

    // The bucket that the next split divides; entries whose hash has the bit `split_bit()` go to bucket `buckets()`.
    size_t split_bucket() const { return buckets_ - base_; }
    uint64_t split_bit() const { return base_; }
    void ensure_room(size_t more) { if (buckets_ + more > capacity_) reserve(buckets_ + more); }
    void grown() {
        if (++buckets_ == 2 * base_) base_ *= 2;
    }

    // Undo the latest split in the bookkeeping; returns the bucket that takes over the content of `buckets()`.
    size_t shrink() {
        if (buckets_ == base_) base_ /= 2;
        --buckets_;
        return buckets_ - base_;
    }
    // Give some memory of unused capacity back; false when there is none.
    bool trim() {
        const size_t wanted = rounded(buckets_);
        if (wanted >= capacity_) return false;
        remap(capacity_ - wanted > kTrim ? capacity_ - kTrim : wanted);
        return true;
    }

private:
    static constexpr size_t kStep = 1 << 14;    // 64 KiB of heads at a time
    static constexpr size_t kTrim = 4 * kStep;  // unmapping 1 MiB takes 0.2 ms

    static size_t rounded(size_t buckets) { return (buckets + kStep - 1) / kStep * kStep; }

    void reserve(size_t buckets) { remap(rounded(buckets)); }

    void remap(size_t capacity) {
        void* memory;
        if (heads_ == nullptr) {
            memory = mmap(nullptr, capacity * sizeof(Position), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                          -1, 0);
        } else {
            // Moves page table entries, not content: 64 MiB of heads grow in microseconds.
            memory = mremap(heads_, capacity_ * sizeof(Position), capacity * sizeof(Position), MREMAP_MAYMOVE);
        }
        if (memory == MAP_FAILED) throw std::bad_alloc();
        heads_ = static_cast<Position*>(memory);
        capacity_ = capacity;
    }

    Position* heads_ = nullptr;
    size_t capacity_ = 0;
    size_t buckets_ = 0;
    size_t base_ = 0;  // power of two, base_ <= buckets_ < 2 * base_
};

}  // namespace verl_war
