#pragma once

#include <cstdint>
#include <string>

namespace mla::cli {

/// Shows on standard error how far a long command is: a bar that is drawn anew on a terminal, a
/// plain line at every tenth of the way where there is none.
class Progress {
 public:
  /// unit  what is counted, "tokens"; `enabled` false: shows nothing
  Progress(int64_t total, std::string unit, bool enabled);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// `done` of `total` so far; `note` stands behind the count.
  void show(int64_t done, const std::string& note);

 private:
  void draw_bar(double share, const std::string& text);

  int64_t total_;
  std::string unit_;
  bool enabled_;
  bool terminal_;
  bool bar_is_drawn_ = false;
  double next_bar_s_ = 0;  // not more than ten a second
  int next_tenth_ = 1;
};

}  // namespace mla::cli
