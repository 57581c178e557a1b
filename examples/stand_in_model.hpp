#pragma once

// What engine.cpp has in place of a model: seeded weights and plain loops on the host.
// All else there is real.
#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

constexpr int64_t kHidden = 32, kVocab = 64;

using Rows = std::vector<float>;  // [T, width], row-major

inline Rows stand_in_projection(const Rows& rows, int64_t from, int64_t to, uint64_t seed) {
  std::mt19937_64 random(seed);
  Rows result(std::ssize(rows) / from * to);
  for (int64_t w = 0; w < from * to; ++w) {
    const float weight = static_cast<float>(random() >> 40) * 0x1p-24F - 0.5F;
    for (int64_t t = 0; t < std::ssize(rows) / from; ++t) {
      result[t * to + w % to] += rows[t * from + w / to] * weight;
    }
  }
  return result;
}

inline Rows stand_in_embedding(const std::vector<int>& tokens) {
  Rows one_hot(tokens.size() * kVocab);
  for (size_t t = 0; t < tokens.size(); ++t) one_hot[t * kVocab + tokens[t]] = 1;
  return stand_in_projection(one_hot, kVocab, kHidden, 1);
}

inline std::vector<int> stand_in_next_tokens(const Rows& hidden) {
  const Rows scores = stand_in_projection(hidden, kHidden, kVocab, 0);
  std::vector<int> tokens;
  for (auto row = scores.begin(); row != scores.end(); row += kVocab) {
    tokens.push_back(static_cast<int>(std::max_element(row, row + kVocab) - row));
  }
  return tokens;
}
