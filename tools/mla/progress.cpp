#include "mla/progress.hpp"

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "mla/clock.hpp"

namespace mla::cli {
namespace {

constexpr int kBarCells = 20;
constexpr double kBarEverySeconds = 0.1;

size_t terminal_columns() {
  winsize size{};
  constexpr size_t kUsual = 80;
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : kUsual;
}

}  // namespace

Progress::Progress(int64_t total, std::string unit, bool enabled)
    : total_(std::max<int64_t>(1, total)),
      unit_(std::move(unit)),
      enabled_(enabled),
      terminal_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (bar_is_drawn_) fmt::print(stderr, "\r\x1b[K");  // the result takes its place
}

void Progress::show(int64_t done, const std::string& note) {
  if (!enabled_) return;
  const double share = std::min(1.0, static_cast<double>(done) / static_cast<double>(total_));
  const std::string text = fmt::format("{:3.0f} % of {} {}, {}", 100 * share, total_, unit_, note);
  if (terminal_) {
    draw_bar(share, text);
  } else if (const int tenth = static_cast<int>(10 * share); tenth >= next_tenth_) {
    next_tenth_ = tenth + 1;
    fmt::print(stderr, "{}\n", text);
  }
}

void Progress::draw_bar(double share, const std::string& text) {
  if (share < 1 && now_s() < next_bar_s_) return;  // the end is always shown
  next_bar_s_ = now_s() + kBarEverySeconds;
  const int full = static_cast<int>(share * kBarCells);
  std::string line = fmt::format("[{:#<{}}{:.<{}}] {}", "", full, "", kBarCells - full, text);
  // A line that wraps could not be drawn over.
  line.resize(std::min(line.size(), terminal_columns() - 1));
  fmt::print(stderr, "\r{}\x1b[K", line);
  std::fflush(stderr);
  bar_is_drawn_ = true;
}

}  // namespace mla::cli
