// A mutex that lets the decode path go first: bulk work waits while a decode call waits.
#pragma once

#include <condition_variable>
#include <mutex>

namespace verl_war {

enum class Urgency { kDecode, kBulk };

class Gate {
public:
    bool try_enter(Urgency urgency) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (busy_ || (urgency == Urgency::kBulk && waiting_decode_ > 0)) return false;
        return busy_ = true;
    }
    void enter(Urgency urgency) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (urgency == Urgency::kDecode) {
            ++waiting_decode_;
            free_for_decode_.wait(lock, [&] { return !busy_; });
            --waiting_decode_;
        } else {
            free_for_bulk_.wait(lock, [&] { return !busy_ && waiting_decode_ == 0; });
        }
        busy_ = true;
    }
    void leave() {
        bool decode;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            busy_ = false;
            decode = waiting_decode_ > 0;
        }
        (decode ? free_for_decode_ : free_for_bulk_).notify_one();
    }

private:
    std::mutex mutex_;
    std::condition_variable free_for_decode_, free_for_bulk_;
    bool busy_ = false;
    int waiting_decode_ = 0;
};

class Entered {
public:
    explicit Entered(Gate& gate, Urgency urgency) : gate_(gate) { gate_.enter(urgency); }
    ~Entered() { gate_.leave(); }
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;

private:
    Gate& gate_;
};

}  // namespace verl_war
