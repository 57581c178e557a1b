#include "mla/ceilings.hpp"

// Stands for matrix_rate.cpp in a build without mla::layer, which has the products.
std::optional<double> mla::cli::measure_matrix_tflops(Device) { return std::nullopt; }
