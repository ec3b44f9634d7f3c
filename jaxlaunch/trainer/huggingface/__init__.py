"""Models and weights in the format of Hugging Face: conversion, loading and saving."""
