#include "engine/stream_table.hpp"

#include <utility>

namespace mla::engine {

int32_t StreamTable::find_label(std::string_view label) const {
  for (size_t i = 0; i < labels_.size(); ++i) {  // a handful
    if (labels_[i] == label) return static_cast<int32_t>(i);
  }
  return -1;
}

StreamState* StreamTable::find(RequestId request, int32_t label) {
  const auto found = streams_.find({request, label});
  return found == streams_.end() ? nullptr : &found->second;
}

StreamState* StreamTable::find(RequestId request, std::string_view label) {
  return const_cast<StreamState*>(std::as_const(*this).find(request, label));
}

const StreamState* StreamTable::find(RequestId request, std::string_view label) const {
  const auto found = streams_.find({request, find_label(label)});
  return found == streams_.end() ? nullptr : &found->second;
}

int32_t StreamTable::number_of(std::string_view label) {
  const int32_t number = find_label(label);
  if (number >= 0) return number;
  labels_.emplace_back(label);
  return num_labels() - 1;
}

StreamState& StreamTable::insert(RequestId request, std::string_view label) {
  const int32_t number = number_of(label);
  StreamState& stream = streams_[{request, number}];
  stream.request = request;
  stream.label = number;
  return stream;
}

void StreamTable::erase(const StreamState& stream) {
  streams_.erase({stream.request, stream.label});
}

StreamTable::Node StreamTable::take_out(const StreamState& stream) {
  return streams_.extract({stream.request, stream.label});
}

void StreamTable::put_back(Node stream) { streams_.insert(std::move(stream)); }

}  // namespace mla::engine
