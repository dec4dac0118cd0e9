// Problems as the index of a bundle has them.
#pragma once

#include "attention_autotuner/client.hpp"
#include "json.hpp"

namespace attention_autotuner {

// A problem of an object's members; those that it lacks keep their defaults unless `complete`, where every one must be
// there. Throws json::ParseError for what is no problem, UnsupportedProblemError for one that kernels cannot solve.
Problem problem_of(json::Value const& object, bool complete);

// The layer of a name; throws json::ParseError.
Layer layer_of(std::string const& name);

}  // namespace attention_autotuner
